"""What attacks are made of, and how one is told from a success: imported inside sessions, and by the test for its list.

An attack is a function of the facts that the test tells it (pids, paths, addresses of what is outside). It returns what
it got, None if only the test can see that, or raises the OSError of who refused it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
BLOCKED, BOUNDED, OPEN = "blocked", "bounded", "open"


class Verdict(NamedTuple):
    """How an attack went, and what was seen of it."""

    how: str
    seen: str


class Attack(NamedTuple):
    """One hostile program.

    Attributes:
        name: Of module and function.
        run: The function.
        row: The README's, of its table of where a tier ends.
        expected: Where no tag below says otherwise.
        opened: Where it gets through: combinations of the test's tags (tier, user, ...), joined by "+".
        body: What the request has besides: limits, time-out.
    """

    name: str
    run: Callable[[dict[str, Any]], Any]
    row: str
    expected: str
    opened: tuple[str, ...]
    body: dict[str, Any]


ATTACKS: dict[str, Attack] = {}


def attack(row: str, *opened: str, expected: str = BLOCKED, **body: Any) -> Callable[[Any], Any]:
    """List a function as an attack."""

    def enlist(run: Any) -> Any:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        ATTACKS[name] = Attack(name, run, row, expected, opened, body)
        return run

    return enlist


def judge(name: str, facts: dict[str, Any]) -> None:
    """Run an attack and say how it went, in the last line of the output."""
    print("\n" + json.dumps(tried(ATTACKS[name].run, facts)), flush=True)


def tried(run: Callable[[dict[str, Any]], Any], facts: dict[str, Any]) -> Verdict:
    """Run an attack; give how it went, as far as it can tell."""
    try:
        got = run(facts)
    except (OSError, MemoryError) as error:
        return refusal(error)
    return got if isinstance(got, Verdict) else Verdict("unseen" if got is None else OPEN, repr(got)[:300])


def refusal(error: BaseException) -> Verdict:
    return Verdict(BLOCKED, f"{type(error).__name__}: {error}")


def any_open(tries: list[Callable[[], Any]]) -> Verdict:
    """Give what the first successful try got; the refusal of the last if there is none."""
    last = Verdict(BLOCKED, "nothing to try")
    for each in tries:
        try:
            return Verdict(OPEN, repr(each())[:300])
        except OSError as error:
            last = refusal(error)
    return last


def bounded(made: int, most: int) -> Verdict:
    """Judge how much of something there was to be had."""
    return Verdict(BOUNDED if made <= most else OPEN, f"{made}, limit {most}")


def call(number: int, *args: Any) -> int:
    """Make a system call.

    Raises:
        OSError: As the kernel has it.
    """
    result = int(LIBC.syscall(ctypes.c_long(number), *args))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def reach(number: int, *args: Any) -> str:
    """Make a system call with arguments that are harmless; what it says of them shows that it was let through.

    Raises:
        OSError: It was refused.
    """
    try:
        return f"call {number}: {call(number, *args)}"
    except OSError as error:
        if error.errno in REFUSED:
            raise
        return f"call {number}: {error}"


def long(value: int) -> Any:
    return ctypes.c_long(value)


def text(path: str) -> str:
    with open(path, "rb") as source:
        return source.read(4096).decode("utf-8", "replace")


def dies(act: Callable[[], Any]) -> Verdict:
    """Do something in a child; blocked if it was killed for it."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS
    return Verdict(BLOCKED if killed else OPEN, f"wait status {status}")


def is_x86() -> bool:
    return platform.machine() == "x86_64"


def spawned(argv: list[str]) -> str:
    """Run a program, give what it said."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.execvp(argv[0], argv)
        finally:
            os._exit(127)
    os.close(write)
    with open(read, "rb") as said:
        output = said.read().decode("utf-8", "replace")
    os.waitpid(pid, 0)
    return output


def unix_connect(address: Any) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(address)
        return f"connected to {address!r}"
