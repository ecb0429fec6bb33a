"""The program that runs inside a session: keeper, launcher, candidate. Read as text, never imported by the host.

::

    keeper      reads the request, drives the candidate, writes the one report; holds the secrets
      launcher    forked before the request is read; forks a candidate's process per run, reaps and sweeps it
        candidate   another uid where there is one, no capabilities, two pipes and nothing else

The modules are joined into one source string (``spec/program.py``) with ``values.py``, the only thing they import;
so: standard library only, Python 3.8+, top-level definitions with names that do not collide. Around a candidate's
code, and only there, a catch-all stands: whatever it raises is its own.
"""
