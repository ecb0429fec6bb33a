"""Attacks on files: the machine's, the user's, other sessions', and those that this interpreter is made of."""

import os
import stat
import sys

from .tools import BLOCKED, LIBC, OPEN, Verdict, any_open, attack, call, long, spawned, text

FILES = "other sessions' and the user's files"
NAMES = "names, sizes and times of files outside"


@attack(FILES, "root+seccomp", "root+rlimits")
def shadow(facts):
    return text("/etc/shadow")


@attack(FILES, "seccomp", "rlimits")
def homes(facts):
    return os.listdir("/home")


@attack(FILES, "seccomp", "rlimits")
def read(facts):
    return text(facts["file"])


@attack(FILES, "seccomp", "rlimits")
def listing(facts):
    return os.listdir(os.path.dirname(facts["file"]))


@attack(FILES, "seccomp", "rlimits")
def append(facts):
    with open(facts["file"], "a") as target:
        return target.write("")


@attack(FILES, "seccomp", "rlimits")
def create(facts):
    with open(facts["leaf"], "w") as target:
        target.write("x")


@attack(FILES, "seccomp", "rlimits")
def make_directory(facts):
    os.mkdir(facts["leaf"])


@attack(FILES, "seccomp", "rlimits")
def rename_out(facts):
    with open("mine", "w") as target:
        target.write("x")
    os.rename("mine", facts["leaf"])


@attack(FILES, "seccomp", "rlimits")
def bind_out(facts):
    """A fifo is neither a file to be opened nor a directory."""
    os.mkfifo(facts["leaf"])


@attack(FILES, "seccomp", "rlimits")
def symlink_out(facts):
    os.symlink("/etc/passwd", facts["leaf"])


@attack(FILES, "seccomp", "rlimits")
def hard_link_out(facts):
    with open("mine", "w") as target:
        target.write("x")
    os.link("mine", facts["leaf"])


@attack(FILES, "seccomp", "rlimits")
def hard_link_in(facts):
    os.link(facts["file"], "linked")
    return text("linked")


@attack(FILES, "seccomp", "rlimits")
def symlink_in(facts):
    os.symlink(facts["file"], "linked")
    return text("linked")


@attack(FILES, "seccomp", "rlimits")
def rename_in(facts):
    os.rename(facts["spare"], "mine")
    os.rename("mine", facts["spare"])
    return True


@attack(FILES, "seccomp", "rlimits")
def exchange(facts):
    """renameat2 with RENAME_EXCHANGE."""
    with open("mine", "w") as target:
        target.write("x")
    at = long(-100)
    call(316 if os.uname().machine == "x86_64" else 276, at, b"mine", at, facts["spare"].encode(), long(2))
    return os.rename("mine", facts["spare"]) or True


@attack(FILES, "seccomp", "rlimits")
def truncate(facts):
    return os.truncate(facts["spare"], 0) or True


@attack(FILES, "seccomp", "rlimits")
def truncate_without_writing(facts):
    return os.close(os.open(facts["spare"], os.O_RDONLY | os.O_TRUNC)) or True


@attack(FILES, "seccomp", "rlimits")
def truncate_with_neither(facts):
    return os.close(os.open(facts["spare"], 3 | os.O_TRUNC)) or True


@attack(FILES, "seccomp", "rlimits")
def change_mode(facts):
    os.chmod(facts["spare"], 0o604)
    return _changed("its mode", stat.S_IMODE(os.stat(facts["spare"]).st_mode) == 0o604)


def _changed(what, is_so):
    """A call that says it is well may have done nothing."""
    if not is_so:
        raise PermissionError(f"{what} was not changed")
    return what


@attack(FILES, "seccomp", "rlimits")
def change_owner(facts):
    return os.chown(facts["spare"], os.getuid(), os.getgid()) or True


@attack(FILES, "seccomp", "rlimits")
def change_times(facts):
    os.utime(facts["spare"], (0, 0))
    return _changed("its time", os.stat(facts["spare"]).st_mtime == 0)


@attack(FILES, "seccomp", "rlimits")
def set_attribute(facts):
    return os.setxattr(facts["spare"], "user.attack", b"x") or True


@attack(FILES, "seccomp", "rlimits")
def watch(facts):
    handle = LIBC.inotify_init()
    if handle < 0 or LIBC.inotify_add_watch(handle, os.path.dirname(facts["file"]).encode(), 0x100) < 0:
        raise PermissionError("inotify")
    return handle


@attack(NAMES, "landlock", "seccomp", "rlimits")
def ask_size(facts):
    return os.stat(facts["file"]).st_size


@attack(FILES, "seccomp", "rlimits")
def through_own_root(facts):
    return text("/proc/self/root" + facts["file"])


@attack(FILES, "seccomp", "rlimits")
def through_root_of_first(facts):
    """Root without capabilities may not look at root's processes that have some."""
    return any_open([lambda p=p: text(f"/proc/{p}/root{facts['file']}") for p in (1, facts["victim_pid"])])


@attack(FILES)
def through_directory_of_parent(facts):
    parent, names = os.getppid(), ("cwd", "root", "fd/0", "exe")
    return any_open([lambda n=n: os.readlink(f"/proc/{parent}/{n}") for n in names])


@attack(FILES)
def through_directory_of_zygote(facts):
    names = [f"/proc/{pid}/{name}" for pid in facts["ours"] for name in ("cwd", "root", "fd/0", "exe")]
    return any_open([lambda n=n: os.readlink(n) for n in names])


@attack(FILES)
def up_and_out(facts):
    """A directory that is held open while its parent is moved, and a chroot that is left."""
    os.makedirs("a/b", exist_ok=True)
    os.chroot("a")
    os.chdir("../" * 30)
    return text("." + facts["file"])


@attack(FILES)
def open_by_handle(facts):
    """The inode of /, whose number is known, needs no path."""
    handle = (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(4)
    here = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    return call(304 if os.uname().machine == "x86_64" else 265, long(here), handle, long(os.O_RDONLY))


@attack(FILES, "seccomp", "rlimits")
def program_in_memory(facts):
    """What is executed from a file without a name is behind the same fence."""
    handle = os.memfd_create("cat", 0)
    with open("/bin/cat", "rb") as source, open(handle, "wb", closefd=False) as target:
        target.write(source.read())
    said = spawned([f"/proc/self/fd/{handle}", facts["file"]])
    said = said or spawned([f"/dev/fd/{handle}", facts["file"]])
    return Verdict(OPEN if facts["mark"] in said else BLOCKED, said)


@attack(FILES, "seccomp", "rlimits")
def program(facts):
    said = spawned(["cat", facts["file"]])
    return Verdict(OPEN if facts["mark"] in said else BLOCKED, said)


@attack(FILES, "seccomp", "rlimits")
def other_sessions_work(facts):
    return text(os.path.join(facts["victim_work"], "victims"))


@attack(FILES, "seccomp", "rlimits")
def other_sessions_tmp(facts):
    return text(os.path.join(facts["victim_tmp"], "victims"))


@attack(FILES, "seccomp", "rlimits")
def other_sessions_directories(facts):
    if facts["namespaces"]:
        raise PermissionError("the same paths are one's own here")
    beside = os.path.dirname(os.path.dirname(facts["victim_work"]))
    return any_open([lambda: os.listdir(beside), lambda: os.listdir(os.path.dirname(facts["socket"]))])


@attack(FILES, "seccomp", "rlimits")
def plant_in_other_session(facts):
    if facts["namespaces"]:
        raise PermissionError("the same path is one's own here")
    path = os.path.join(facts["victim_work"], "planted")
    with open(path, "w") as target:
        target.write("x")
    os.unlink(path)
    return path


@attack(FILES, "seccomp", "rlimits")
def places_that_all_write(facts):
    """The test looks whether it is the machine's own that was written."""
    for name in facts["leaves"]:
        try:
            with open(name, "w") as target:
                target.write("x")
        except OSError:
            continue


def _write_at(path):
    with open(path, "ab"):
        return path


def _make_in(path):
    name = os.path.join(path, "planted.py")
    with open(name, "w"):
        os.unlink(name)
        return name


@attack(FILES, "root+seccomp", "root+rlimits")
def interpreter(facts):
    """Files that zygotes of later sessions read."""
    files = [os.__file__, sys.executable, "/bin/sh", "/usr/bin/env", "/etc/passwd", "/etc/ld.so.cache"]
    folders = [os.path.dirname(os.__file__), "/usr/bin", "/usr/lib", "/etc", "/", "/root"]
    folders += [path for path in sys.path if os.path.isdir(path) and path != os.getcwd()]
    return any_open([lambda p=p: _write_at(p) for p in files] + [lambda p=p: _make_in(p) for p in folders])


@attack(FILES, "root+seccomp", "root+rlimits")
def change_mode_of_interpreter(facts):
    """What may be read can be opened, and then changed by its owner; here by a bit that nobody uses, and back."""
    with open(os.__file__) as source:
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
        os.fchmod(source.fileno(), mode | stat.S_ISVTX)
        changed = stat.S_IMODE(os.fstat(source.fileno()).st_mode) != mode
        os.fchmod(source.fileno(), mode)
    return _changed("its mode", changed)


@attack(FILES, "root+seccomp", "root+rlimits")
def devices(facts):
    """Everything in /dev but what is harmless."""
    harmless = {"null", "zero", "full", "random", "urandom", "stdin", "stdout", "stderr", "tty", "ptmx"}
    names = set(os.listdir("/dev")) - harmless if os.access("/dev", os.R_OK) else set()
    names |= {"mem", "kmem", "kmsg", "port", "kvm", "fuse", "vda", "sda", "net/tun", "uinput", "loop0"}
    found = [lambda n=n: (n, os.open("/dev/" + n, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)) for n in sorted(names)]
    return any_open([each for each, name in zip(found, sorted(names), strict=False) if _is_device("/dev/" + name)])


def _is_device(path):
    mode = os.stat(path).st_mode if os.path.exists(path) else 0
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


@attack(FILES)
def make_device(facts):
    return any_open(
        [
            lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)) or "block",
            lambda: os.mknod("mem", 0o20600, os.makedev(1, 1)) or "character",
            lambda: os.mknod("/dev/attack", 0o20600, os.makedev(1, 1)) or "character",
        ]
    )


@attack("processes outside: see them, signal them", "root+seccomp", "root+rlimits")
def kernel_settings(facts):
    names = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/kcore"]
    names += ["/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/ksm/run", "/proc/kmsg"]
    names += ["/proc/sysrq-trigger"]
    return any_open([lambda p=p: (p, os.open(p, os.O_RDWR | os.O_NONBLOCK)) for p in names])


@attack("number of processes", "root+seccomp", "root+rlimits")
def leave_cgroup(facts):
    """Root without capabilities still owns root's files."""
    found = [f"/sys/fs/cgroup/{name}/cgroup.procs" for name in ("memory", "pids", "cpu", "unified", ".")]
    return any_open([lambda p=p: (p, os.close(os.open(p, os.O_WRONLY))) for p in found])
