"""Attacks on processes: other sessions', the session's own first one, the zygote, the daemon, and others of its user.

Signals are number 0 where they might get through: only the right to send them is at stake.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket

from .tools import BLOCKED, LIBC, OPEN, Verdict, any_open, attack, call, is_x86, long, spawned, text

SEEN = "processes outside: see them, signal them"
OWN = "a session's own limits and rights"
FIRST_KILLED = "to be killed first when the machine is out of memory"


def _others(facts):
    """Pids as the machine knows them, the session's own first among them where it has no numbers of its own."""
    own = [] if facts["namespaces"] else [os.getppid(), 1]
    return [*facts["ours"], facts["victim_pid"], facts["bystander"], *own]


@attack(SEEN, "seccomp", "rlimits")
def list_all(facts):
    """More than one's own, the session's first and what tools start is somebody else's."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return Verdict(OPEN if len(pids) > 4 else BLOCKED, str(pids)[:200])


@attack(SEEN, "rlimits")
def signal_them(facts):
    return any_open([lambda p=p: (p, os.kill(p, 0)) for p in _others(facts)])


@attack(SEEN, "rlimits")
def signal_by_descriptor(facts):
    def send(pid):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, 0)
        finally:
            os.close(handle)
        return pid

    if not hasattr(os, "pidfd_open"):
        raise PermissionError("this Python has none")
    return any_open([lambda p=p: send(p) for p in _others(facts)])


@attack(SEEN, "rlimits")
def signal_by_file(facts):
    """The kernel signals whom F_SETOWN names when a socket is ready: it checks who may when that happens.

    The signal is SIGURG, which nobody dies of; whether it arrives is not seen here, so where Landlock or another user
    stands before it the call itself may be let through.
    """
    near, far = socket.socketpair()
    seen = any_open([lambda p=p: (p, fcntl.fcntl(near, fcntl.F_SETOWN, p)) for p in facts["ours"][:1]])
    near.close()
    far.close()
    guarded = facts["scoped"] or facts["namespaces"]
    return Verdict(BLOCKED, "checked when it is sent") if guarded else seen


@attack(SEEN, "rlimits")
def queue_signal(facts):
    info = (ctypes.c_int * 32)(0, 0, -1)
    number = 129 if is_x86() else 138
    return any_open([lambda p=p: (p, call(number, long(p), long(0), info)) for p in _others(facts)])


@attack(SEEN, "rlimits")
def signal_threads(facts):
    number = 234 if is_x86() else 131
    return any_open([lambda p=p: (p, call(number, long(p), long(p), long(0))) for p in _others(facts)])


@attack(SEEN, "rlimits")
def trace(facts):
    """PTRACE_SEIZE of each, PTRACE_ATTACH of the session's first."""
    number = 101 if is_x86() else 117
    found = [lambda p=p: (p, call(number, long(0x4206), long(p), 0, 0)) for p in _others(facts)]
    return any_open([*found, lambda: call(number, long(16), long(os.getppid()), 0, 0)])


@attack(SEEN, "rlimits")
def trace_me(facts):
    return call(101 if is_x86() else 117, long(0), 0, 0, 0)


@attack(SEEN, "seccomp", "rlimits")
def memory_of_other_session(facts):
    return os.close(os.open(f"/proc/{facts['victim_pid']}/mem", os.O_RDONLY)) or True


@attack(SEEN)
def memory_of_daemon(facts):
    names = [f"/proc/{facts['ours'][0]}/{name}" for name in ("mem", "environ", "maps", "fd/0", "auxv")]
    return any_open([lambda n=n: (n, os.open(n, os.O_RDONLY)) for n in names])


@attack(SEEN)
def memory_of_parent(facts):
    names = [f"/proc/{os.getppid()}/{name}" for name in ("mem", "environ", "maps", "fd/0", "auxv")]
    return any_open([lambda n=n: (n, os.open(n, os.O_RDONLY)) for n in names])


@attack(SEEN)
def write_memory_of_others(facts):
    return any_open([lambda p=p: (p, os.open(f"/proc/{p}/mem", os.O_RDWR)) for p in facts["ours"]])


@attack(SEEN, "seccomp", "rlimits")
def environment_of_other_session(facts):
    seen = text(f"/proc/{facts['victim_pid']}/environ")
    return Verdict(OPEN if facts["mark"] in seen else BLOCKED, "environ")


@attack(SEEN, "rlimits")
def copy_memory(facts):
    """process_vm_readv and process_vm_writev, even of oneself."""
    local = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(local), 8)
    numbers = (310, 311) if is_x86() else (270, 271)
    tries = [
        lambda n=n, p=p: call(n, long(p), vector, long(1), vector, long(1), long(0))
        for n in numbers
        for p in [*_others(facts), os.getpid()]
    ]
    return any_open(tries)


@attack(SEEN, "rlimits")
def take_descriptor(facts):
    """pidfd_getfd; pidfd_open may be refused already."""

    def take(pid):
        handle = call(434, long(pid), long(0))
        try:
            return call(438, long(handle), long(0), long(0))
        finally:
            os.close(handle)

    return any_open([lambda p=p: take(p) for p in [*facts["ours"], facts["victim_pid"], os.getppid()]])


@attack(SEEN, "rlimits")
def limit_others(facts):
    """Another session, whose limits are its own."""
    limits = resource.prlimit(facts["bystander"], resource.RLIMIT_CORE)
    return resource.prlimit(facts["bystander"], resource.RLIMIT_CORE, limits)


@attack(SEEN, "rlimits")
def slow_others(facts):
    return os.setpriority(os.PRIO_PROCESS, facts["bystander"], 19) or True


@attack(SEEN, "rlimits")
def slow_a_group_of_others(facts):
    return os.setpriority(os.PRIO_PGRP, facts["bystander"], 19) or True


@attack(SEEN, "rlimits")
def pin_others(facts):
    return os.sched_setaffinity(facts["bystander"], os.sched_getaffinity(facts["bystander"])) or True


@attack(SEEN, "rlimits")
def schedule_others(facts):
    return os.sched_setscheduler(facts["bystander"], os.SCHED_BATCH, os.sched_param(0)) or True


@attack(SEEN)
def trace_by_name(facts):
    """PR_SET_PTRACER, PR_SET_MM: who may trace us, what we are called and where our pieces lie."""
    return any_open([lambda o=o: _prctl(o) for o in (0x59616D61, 35)])


def _prctl(option):
    if LIBC.prctl(option, ctypes.c_ulong(0), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return option


@attack(OWN)
def raise_limits(facts):
    def higher(name):
        soft, hard = resource.getrlimit(getattr(resource, name))
        if hard == resource.RLIM_INFINITY:
            raise PermissionError("not limited at all")
        try:
            resource.setrlimit(getattr(resource, name), (soft, hard + 1))
        except ValueError as error:  # what Python makes of EPERM
            raise PermissionError(str(error)) from error
        return name

    names = ("AS", "NOFILE", "FSIZE", "CORE", "NPROC", "MEMLOCK", "NICE")
    return any_open([lambda n=n: higher("RLIMIT_" + n) for n in names])


@attack(OWN)
def raise_priority(facts):
    return any_open(
        [
            lambda: os.setpriority(os.PRIO_PROCESS, 0, 0) or "nice",
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) or "fifo",
            lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)) or "rr",
            lambda: call(251 if is_x86() else 30, long(1), long(0), long(1 << 13)) or "io real time",
        ]
    )


@attack(FIRST_KILLED, "seccomp", "rlimits")
def be_spared_by_the_memory_killer(facts):
    with open("/proc/self/oom_score_adj", "w") as target:
        target.write("0")
    return text("/proc/self/oom_score_adj")


@attack(OWN)
def other_user(facts):
    """Who is root here has no capability, and so is only root's namesake."""
    other = os.getuid() + 1
    changes = (lambda: os.setuid(other), lambda: os.setgid(other), lambda: os.setgroups([other]))
    changes += (lambda: os.setresuid(other, other, other), lambda: os.setreuid(-1, other), lambda: os.seteuid(other))
    return any_open([lambda c=c: c() or "changed" for c in changes])


@attack(OWN)
def capabilities(facts):
    """Those in force and to be had; only root can also empty the set of those that programs may bring."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    LIBC.capget(header, data)
    bounding = [cap for cap in range(64) if LIBC.prctl(23, ctypes.c_ulong(cap), 0, 0, 0) == 1]
    privileges = LIBC.prctl(39, 0, 0, 0, 0) == 1
    rest = bounding if facts["root"] else []
    return Verdict(BLOCKED if privileges and not rest and not any(data) else OPEN, str((bounding, list(data))))


@attack(OWN)
def set_uid_program(facts):
    """Whoever can start ``su`` is not root by it: its file would be, if anything could be."""
    said = spawned(["sh", "-c", "su -c 'cat /etc/shadow' </dev/null; mount -t tmpfs none /mnt && echo mounted"])
    return Verdict(OPEN if "mounted" in said or "root:" in said else BLOCKED, said)


@attack(OWN)
def inherited_descriptors(facts):
    """A graded candidate has two pipes more, to the runner."""
    found = []
    for fd in range(3 + facts["pipes"], 1024):
        try:
            found.append((fd, fcntl.fcntl(fd, fcntl.F_GETFL)))
        except OSError:
            continue
    return Verdict(OPEN if found else BLOCKED, str(found))


@attack(OWN)
def inherited_environment(facts):
    """The daemon has a secret in its own; a zygote's is what the kernel shows of a fork of it."""
    seen = [str(os.environ)]
    for pid in ("self", os.getppid(), *facts["ours"]):
        try:
            seen.append(text(f"/proc/{pid}/environ"))
        except OSError:
            continue
    return Verdict(OPEN if facts["environment"] in "".join(seen) else BLOCKED, f"{len(seen)} seen")
