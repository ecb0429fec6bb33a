"""What builds a sandbox and what runs inside it before the candidate does: system calls, zygotes, sessions.

Read by other interpreters too (a template's own), so: standard library only, Python 3.8+, relative imports only.
Must not know the wire, specs or Ray.
"""
