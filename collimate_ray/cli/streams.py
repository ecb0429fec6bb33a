"""Standard output and error, where a reader that went away changes nothing: not the work, not the exit code.

The interpreter flushes both once more at exit and exits with 120 where it can't; hence what fails here is
pointed at the null device for good. Must not decide what is said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def ensure() -> None:
    """Give this process whichever of the three standard streams it was started without (``2>&-``).

    Ray and logging expect them, and a file opened later must not get one of their numbers.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, fd == number)
            setattr(sys, name, os.fdopen(fd, mode))


def emit(text: str) -> None:
    """Print to standard output; a reader that went away (``| head``) is no error: the results are in OUT."""
    problem = _write(sys.stdout, text)
    if problem is not None and not isinstance(problem, BrokenPipeError):
        say(f"collimate-ray: cannot write to standard output: {problem.strerror}")


def say(text: str) -> None:
    """Print to standard error; nobody is left to tell where that fails."""
    _write(sys.stderr, text)


def settle() -> None:
    """Flush what others (argparse, logging) left in both streams."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "", end="")


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what is written to standard error inside, native libraries' lines included."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _write(stream: TextIO, text: str, end: str = "\n") -> OSError | None:
    """Print and flush; give what went wrong, after which the stream leads nowhere."""
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None
