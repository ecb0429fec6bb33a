"""Hostile programs, by what they are after. Sent into sessions as they are: standard library, Python 3.8+."""
