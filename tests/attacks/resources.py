"""Attacks on what a machine has a bounded amount of: each takes until it is refused, or far more than its limit."""

import ctypes
import mmap
import os
import signal
import socket
import threading
import time

from .tools import BOUNDED, LIBC, OPEN, Verdict, attack, bounded

PROCESSES = "number of processes"
DISK = "disk and number of files of a session"
MEMORY = "memory of an exec"
UNMAPPED = "memory in files that no process maps (`memfd_create`)"
FILES_OPEN = "open files"
TIME = "time and output of an exec"

#: Where bombs stop by themselves if nothing else stops them, and the limits that they run under.
_MOST, _PROCESSES, _FILES, _MIB = 96, 32, 64, 64


def _count(take, most):
    """Take until it is refused; give how often it was not."""
    made = 0
    try:
        while made < most:
            take()
            made += 1
    except (OSError, MemoryError, RuntimeError):
        pass
    return made


def _fork():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


@attack(PROCESSES, "no-count", expected=BOUNDED, limits={"processes": _PROCESSES})
def forks(facts):
    children = []
    made = _count(lambda: children.append(_fork()), _MOST)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:  # not even one's own children where there is no other way
            break
    return bounded(made, _PROCESSES)


@attack(PROCESSES, "no-count", expected=BOUNDED, limits={"processes": _PROCESSES})
def daemonised_forks(facts):
    """Each in a session of its own, whose parent is gone."""
    told, tell = os.pipe()

    def daemonise():
        middle = os.fork()
        if middle == 0:
            os.setsid()
            try:
                os.fork() == 0 and (os.write(tell, b"x"), signal.pause())
            finally:
                os._exit(0)
        os.waitpid(middle, 0)

    made = _count(daemonise, _MOST)
    os.close(tell)
    os.set_blocking(told, False)
    lives = len(os.read(told, _MOST)) if made else 0
    return bounded(lives, _PROCESSES)


@attack(PROCESSES, "no-count", expected=BOUNDED, limits={"processes": _PROCESSES})
def threads(facts):
    go = threading.Event()
    made = _count(lambda: threading.Thread(target=go.wait, daemon=True).start(), _MOST)
    go.set()
    return bounded(made, _PROCESSES)


@attack(FILES_OPEN, expected=BOUNDED, limits={"files": _FILES})
def descriptors(facts):
    return bounded(_count(lambda: os.dup(0), 4 * _FILES), _FILES)


@attack(FILES_OPEN, expected=BOUNDED, limits={"files": _FILES})
def descriptors_on_the_way(facts):
    """Sent to a socket and closed here, they are held by the kernel."""
    near, _far = socket.socketpair()
    near.setblocking(False)
    reads, _writes = os.pipe()
    return bounded(_count(lambda: socket.send_fds(near, [b"x"], [reads] * 50), 1000), 999)


@attack(MEMORY, expected=BOUNDED, limits={"memory_mib": _MIB})
def one_process(facts):
    taken = []
    return bounded(_count(lambda: taken.append(bytearray(16 << 20)), 64) * 16, 4 * _MIB)


@attack(MEMORY, expected=BOUNDED, limits={"memory_mib": _MIB})
def shared_pages(facts):
    taken = []
    return bounded(_count(lambda: taken.append(mmap.mmap(-1, 16 << 20)), 64) * 16, 4 * _MIB)


@attack(MEMORY, expected=BOUNDED, limits={"memory_mib": _MIB}, timeout_seconds=60)
def many_processes(facts):
    """Each within its limit; they last until somebody looks."""
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (40 << 20)
            signal.pause()
            os._exit(len(held) & 1)
    time.sleep(60)
    return True


@attack(UNMAPPED, "no-cgroups", expected=BOUNDED, limits={"memory_mib": _MIB, "file_mib": 16}, timeout_seconds=60)
def files_in_memory(facts):
    """Nobody maps them, so no process seems to have them."""

    def fill():
        handle = os.memfd_create("hoard")
        for _ in range(16):
            os.write(handle, bytes(1 << 20))

    return bounded(_count(fill, 24) * 16, 4 * _MIB)


@attack(MEMORY, expected=BOUNDED, limits={"files": 256, "memory_mib": _MIB})
def pipes(facts):
    """What a pipe holds is the kernel's, 64 MiB of a user's at most."""
    held = []

    def fill():
        held.append(os.pipe())
        os.set_blocking(held[-1][1], False)
        os.write(held[-1][1], bytes(1 << 20))

    return bounded(_count(fill, 400), 256)


@attack(MEMORY, expected=BOUNDED, limits={"memory_mib": _MIB})
def locked_pages(facts):
    taken = []

    def lock():
        taken.append(mmap.mmap(-1, 16 << 20))
        start = ctypes.addressof(ctypes.c_char.from_buffer(taken[-1]))
        if LIBC.mlock(ctypes.c_void_p(start), ctypes.c_size_t(16 << 20)) != 0:
            raise MemoryError

    return bounded(_count(lock, 64) * 16, 4 * _MIB)


@attack(DISK, "landlock", "seccomp", "rlimits", expected=BOUNDED, template_id="tiny")
def disk(facts):
    """The template gives 8 MiB."""
    numbers = iter(range(1000))

    def fill():
        with open(f"f{next(numbers)}", "wb", buffering=0) as target:
            target.write(bytes(1 << 20)) == 1 << 20 or os.write(-1, b"")

    return bounded(_count(fill, 12), 8)


@attack(DISK, "landlock", "seccomp", "rlimits", expected=BOUNDED, template_id="tiny")
def files(facts):
    """The template gives 200."""
    numbers = iter(range(1000))
    return bounded(_count(lambda: os.mkfifo(f"p{next(numbers)}"), 300), 200)


@attack(DISK, expected=BOUNDED, limits={"file_mib": 1})
def one_file(facts):
    def fill():
        if os.write(handle, bytes(1 << 18)) < 1 << 18:
            raise OSError

    handle = os.open("large", os.O_WRONLY | os.O_CREAT)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return bounded(_count(fill, 12), 4)


@attack(TIME, expected=BOUNDED, limits={"output_mib": 1})
def flood(facts):
    while True:
        os.write(1, b"x" * 65536)


@attack(TIME, expected=BOUNDED, limits={"time_s": 1}, timeout_seconds=60)
def loop(facts):
    """It catches what can be caught."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@attack(TIME, expected=BOUNDED, timeout_seconds=1)
def sleep_behind_closed_doors(facts):
    """Deaf, with its output closed, and with an orphan that keeps it open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    else:
        os.wait()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    if os.getsid(0) != os.getpid() and os.fork():
        for fd in range(3):
            os.close(fd)
    while True:
        time.sleep(60)


@attack(TIME, expected=BOUNDED, timeout_seconds=60)
def end_before_ones_children(facts):
    """The orphan holds the pipe, and nobody waits for it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
    os.wait()
    return Verdict(BOUNDED, "the test waits")


@attack(TIME, expected=BOUNDED)
def dump(facts):
    """A process that dies leaves no image of itself."""
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    image = os.WCOREDUMP(status) or [name for name in os.listdir(".") if "core" in name]
    return Verdict(OPEN if image else BOUNDED, str(status))
