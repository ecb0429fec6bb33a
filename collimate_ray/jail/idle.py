"""A pid namespace's first process that only sits there: it shares the zygote's memory, so that it costs no copy of it.

An exec beside it is forked straight from the zygote, and is an ordinary process: to a first one, the signals that it
sends itself do nothing. It ignores its children's ends, so that the kernel reaps them, and ends with the zygote, for
whose end it waits: a signal at its parent's death could be asked for too late. It must not run Python, whose state it
shares: what it runs stands here as machine code. Sources: clone(2), pid_namespaces(7), setns(2), sigaction(2),
pidfd_open(2).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what ``signal`` wraps in enumerations, which cost a forked child dear
import ctypes
import errno
import mmap
import os
import signal
import struct
from typing import Optional

from . import kernel

#: By machine: rt_sigaction(SIGCHLD, &ignore, 0, 8); push(waited); do poll(stack, 1, -1) until it is 1; exit_group(0).
#: Then ``ignore``, and in the text, where %s stands, ``waited``: {the zygote's pidfd, POLLIN}.
_CODE = {
    "x86_64": "488d3549000000 bf11000000 31d2 41ba08000000 b80d000000 0f05 48b8%s 4883ec40 50"
    "4889e7 be01000000 baffffffff b807000000 0f05 83f801 75e7 31ff b8e7000000 0f05 00000000"
    "0100000000000000 0000000000000000 0000000000000000 0000000000000000"
}
_POLLIN = 1
_CLONE_VM, _CLONE_FS, _CLONE_FILES = 0x100, 0x200, 0x400
_STACK_BYTES = 4096


class Idlers:
    """Starts such processes, and forks others into their namespaces.

    Raises:
        OSError: Not on this machine.
    """

    def __init__(self) -> None:
        if os.uname().machine not in _CODE:
            raise OSError(errno.ENOSYS, "no code for this machine")
        self._own = kernel.open_pidfd(os.getpid())
        waited = struct.pack("=ihh", self._own, _POLLIN, 0)
        code = bytes.fromhex((_CODE[os.uname().machine] % waited.hex()).replace(" ", ""))
        self._text, self._stack = mmap.mmap(-1, mmap.PAGESIZE), mmap.mmap(-1, _STACK_BYTES)
        self._text.write(code)
        self._start = kernel.make_executable(self._text)
        # one for all: what each writes there is the same
        self._stack_end = ctypes.addressof(ctypes.c_char.from_buffer(self._stack)) + _STACK_BYTES
        self._signals = _signal.valid_signals()

    def close(self) -> None:
        """In a child: let go of what leads to the zygote."""
        os.close(self._own)

    def start(self) -> int:
        """Start one in a fresh pid namespace; give its pid."""
        # a handler would run the zygote's Python: nothing but SIGKILL may reach it
        mask = _signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            flags = _CLONE_VM | _CLONE_FS | _CLONE_FILES | kernel.CLONE_NEWPID | signal.SIGCHLD
            return kernel.clone(self._start, self._stack_end, flags)
        finally:
            _signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def fork_beside(self, pidfd: int, flags: int) -> int:
        """Fork into the pid namespace of one, and into other fresh namespaces.

        Returns:
            0 in the child, its pid in the parent.
        """
        kernel.setns(pidfd, kernel.CLONE_NEWPID)
        pid: Optional[int] = None
        try:
            pid = kernel.fork_into(flags)
            return pid
        finally:
            if pid != 0:
                kernel.setns(self._own, kernel.CLONE_NEWPID)


#: Of a process's flags (``/proc/<pid>/stat``): it is on its way out.
_PF_EXITING = 4


def is_ending(pid: int) -> bool:
    """Tell whether a process that was not reaped is on its way out."""
    with open("/proc/%d/stat" % pid, "rb") as status:
        return bool(int(status.read().rpartition(b")")[2].split()[6]) & _PF_EXITING)
