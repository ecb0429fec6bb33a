"""Attacks by system calls that no graded program needs: namespaces, mounts, keys, programs in the kernel, modules."""

import ctypes
import mmap
import os
import socket

from .tools import BLOCKED, LIBC, Verdict, any_open, attack, call, dies, is_x86, long, reach

KERNEL = "system calls beyond what programs need"

#: Name -> numbers on x86_64 and aarch64 (None: it has none), and arguments that do no harm where the call gets through.
_CALLS = {
    "mount": (165, 40, b"none", b"/nowhere", b"tmpfs", long(0), None),
    "umount2": (166, 39, b"/nowhere", long(2)),
    "pivot_root": (155, 41, b"/nowhere", b"/nowhere"),
    "chroot": (161, 51, b"/nowhere"),
    "setns": (308, 268, long(-1), long(0)),
    "fsopen": (430, 430, b"nothing", long(0)),
    "fsmount": (432, 432, long(-1), long(0), long(0)),
    "fsconfig": (431, 431, long(-1), long(0), None, None, long(0)),
    "fspick": (433, 433, long(-100), b"/nowhere", long(0)),
    "open_tree": (428, 428, long(-100), b"/nowhere", long(0)),
    "move_mount": (429, 429, long(-1), b"", long(-1), b"", long(0)),
    "mount_setattr": (442, 442, long(-100), b"/nowhere", long(0), None, long(0)),
    "statmount": (457, 457, None, None, long(0), long(0)),
    "listmount": (458, 458, None, None, long(0), long(0)),
    "add_key": (248, 217, b"user", b"attack", b"x", long(1), long(-2)),
    "request_key": (249, 218, b"user", b"attack", None, long(-3)),
    "keyctl": (250, 219, long(0), long(-3), long(0)),
    "io_uring_setup": (425, 425, long(0), None),
    "io_uring_enter": (426, 426, long(-1), long(0), long(0), long(0), None, long(0)),
    "io_uring_register": (427, 427, long(-1), long(0), None, long(0)),
    "bpf": (321, 280, long(0), None, long(0)),
    "userfaultfd": (323, 282, long(1)),
    "perf_event_open": (298, 241, None, long(0), long(-1), long(-1), long(0)),
    "personality": (135, 92, long(0x0040000)),
    "modify_ldt": (154, None, long(0), None, long(0)),
    "kexec_load": (246, 104, long(0), long(0), None, long(0)),
    "kexec_file_load": (320, 294, long(-1), long(-1), long(0), None, long(0)),
    "init_module": (175, 105, None, long(0), b""),
    "finit_module": (313, 273, long(-1), b"", long(0)),
    "delete_module": (176, 106, b"nothing_of_that_name", long(0o4000)),
    "swapon": (167, 224, b"/nowhere", long(0)),
    "swapoff": (168, 225, b"/nowhere"),
    "reboot": (169, 142, long(0), long(0), long(0), None),
    "syslog": (103, 116, long(10), None, long(0)),
    "acct": (163, 89, b"/nowhere"),
    "settimeofday": (164, 170, None, long(1)),
    "clock_settime": (227, 112, long(0), None),
    "clock_adjtime": (305, 266, long(99), None),
    "sethostname": (170, 161, None, long(100)),
    "setdomainname": (171, 162, None, long(100)),
    "iopl": (172, None, long(3)),
    "ioperm": (173, None, long(0x80), long(1), long(1)),
    "quotactl": (179, 60, long(-1), None, long(0), None),
    "fanotify_init": (300, 262, long(0), long(0)),
    "name_to_handle_at": (303, 264, long(-100), b"/", None, None, long(0)),
    "open_by_handle_at": (304, 265, long(-1), None, long(0)),
    "move_pages": (279, 239, long(0), long(0), None, None, None, long(0)),
    "migrate_pages": (256, 238, long(0), long(0), None, None),
    "kcmp": (312, 272, long(1), long(1), long(0), long(0), long(0)),
    "process_madvise": (440, 440, long(-1), None, long(0), long(0), long(0)),
    "process_mrelease": (448, 448, long(-1), long(0)),
    "memfd_secret": (447, 447, long(-1)),
    "shmget": (29, 194, long(0), long(0), long(0o1600)),
    "shmat": (30, 196, long(-1), None, long(0)),
    "semget": (64, 190, long(0), long(-1), long(0o1600)),
    "msgget": (68, 186, long(0x7A77AC), long(0)),
    "mq_open": (240, 180, b"no_such_queue", long(0), long(0), None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18, long(0), None, long(0)),
    "uselib": (134, None, b"/nowhere"),
    "ustat": (136, None, long(0), None),
    "_sysctl": (156, None, None),
    "remap_file_pages": (216, 234, None, long(0), long(0), long(0), long(0)),
    "vmsplice": (278, 75, long(-1), None, long(0), long(0)),
    "cachestat": (451, 451, long(-1), None, None, long(0)),
    "lsm_get_self_attr": (459, 459, long(0), None, None, long(0)),
}  # fmt: skip


def _refuses(name, numbers, arguments):
    def run(facts):
        number = numbers[0 if is_x86() else 1]
        return Verdict(BLOCKED, "no such call") if number is None else reach(number, *arguments)

    run.__name__, run.__module__ = name, __name__
    return run


# without a filter some of them refuse by themselves those who lack capabilities: that is left to the kernel
for _name, (_x86, _arm, *_arguments) in _CALLS.items():
    attack(KERNEL, "rlimits")(_refuses(_name, (_x86, _arm), _arguments))


@attack(KERNEL, "rlimits")
def unshare(facts):
    """Each namespace by itself, in a child: what gets through must not last."""

    def enter(flag):
        if os.fork() == 0:
            status = 1
            try:
                call(272 if is_x86() else 97, long(flag))
                status = 0
            finally:
                os._exit(status)
        return os.wait()[1] == 0

    flags = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)
    opened = [hex(flag) for flag in flags if enter(flag)]
    if opened:
        return opened
    raise PermissionError("unshare")


@attack(KERNEL, "rlimits")
def clone_into_user_namespace(facts):
    pid = call(56 if is_x86() else 220, long(0x10000000 | 17), None, None, None, None)
    if pid == 0:
        os._exit(0)
    return str(os.waitpid(pid, 0))


@attack(KERNEL, "rlimits")
def clone_as_sibling(facts):
    """CLONE_PARENT makes a child of the session's first process, whom it does not expect."""
    pid = call(56 if is_x86() else 220, long(0x8000 | 17), None, None, None, None)
    if pid == 0:
        os._exit(0)
    return pid


@attack(KERNEL, "rlimits")
def clone3(facts):
    return reach(435, None, long(0))


@attack(KERNEL, "rlimits")
def second_convention(facts):
    """x86_64's x32 numbers mean other calls; its 32-bit entry too."""
    if not is_x86():
        return Verdict(BLOCKED, "no such convention here")
    return dies(lambda: LIBC.syscall(long(0x40000000 + 39)))


@attack(KERNEL, "rlimits")
def third_convention(facts):
    if not is_x86():
        return Verdict(BLOCKED, "no such convention here")
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    entry = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    return dies(entry)


@attack(KERNEL, "rlimits")
def type_into_terminal(facts):
    """TIOCSTI, TIOCLINUX, TIOCSETD: what they say of a pipe shows that the terminal's would have been asked."""
    number = 16 if is_x86() else 29
    text = ctypes.create_string_buffer(8)
    return any_open([lambda c=c: reach(number, long(1), long(c), text) for c in (0x5412, 0x541C, 0x5423)])


@attack(KERNEL, "rlimits")
def be_told_of_others_calls(facts):
    """A filter whose listener answers in the kernel's stead: SECCOMP_FILTER_FLAG_NEW_LISTENER."""
    return reach(317 if is_x86() else 277, long(1), long(8), None)


@attack(KERNEL, "rlimits")
def speculation_and_merging(facts):
    """PR_SET_SPECULATION_CTRL, PR_SET_MEMORY_MERGE, MADV_MERGEABLE: side channels that can be asked for."""
    number = 157 if is_x86() else 167
    tries = [(number, long(53), long(0), long(2)), (number, long(67), long(1), long(0))]
    tries.append((28 if is_x86() else 233, None, long(0), long(12)))
    return any_open([lambda t=t: reach(*t, long(0), long(0)) for t in tries])


@attack(KERNEL, "rlimits")
def huge_pages(facts):
    """Of the machine's reserve: no limit of memory counts them."""
    arguments = (None, long(2 << 20), long(3), long(0x22 | 0x40000), long(-1), long(0))
    return reach(9 if is_x86() else 222, *arguments)


@attack(KERNEL, "rlimits")
def programs_of_sockets(facts):
    """SO_ATTACH_FILTER: compiled and run by the kernel."""
    near, _far = socket.socketpair()
    return reach(54 if is_x86() else 208, long(near.fileno()), long(1), long(26), None, long(0))


@attack(KERNEL, "rlimits")
def hold_up_others(facts):
    """F_SETLEASE keeps who opens the file waiting."""
    with open("leased", "w"):
        pass
    handle = os.open("leased", os.O_RDONLY)
    return reach(72 if is_x86() else 25, long(handle), long(1024), long(0))
