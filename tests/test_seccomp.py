"""The system call filter: what the program decides, for both machines, and what real children meet."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from collimate_ray.jail import seccomp, syscalls
from collimate_ray.jail.seccomp import ALLOW, EPERM, KILL

ROOT = os.getuid() == 0
MACHINE = os.uname().machine
DEBIAN = "/usr/bin/python3"
NOBODY = 65534

VARIANTS = {
    "unix sockets": {"unix_sockets": True},
    "pairs only": {"unix_sockets": False},
    "own signals": {"unix_sockets": False, "own_signals_only": True},
    "own files": {"unix_sockets": False, "own_signals_only": True, "own_files_only": True},
}

#: Calls that no sandboxed program may make, with arguments with which none of them would do anything.
REFUSED = {
    "unshare 272 97": (0,),
    "setns 308 268": (-1, 0),
    "mount 165 40": (0, 0, 0, 0, 0),
    "umount2 166 39": (0, 0),
    "pivot_root 155 41": (0, 0),
    "chroot 161 51": (0,),
    "open_tree 428 428": (-1, 0, 0),
    "move_mount 429 429": (-1, 0, -1, 0, 0),
    "fsopen 430 430": (0, 0),
    "fsmount 432 432": (-1, 0, 0),
    "mount_setattr 442 442": (-1, 0, 0, 0, 0),
    "ptrace 101 117": (99, 0, 0, 0),
    "process_vm_readv 310 270": (0, 0, 0, 0, 0, 1),
    "process_vm_writev 311 271": (0, 0, 0, 0, 0, 1),
    "process_madvise 440 440": (-1, 0, 0, 0, 0),
    "pidfd_getfd 438 438": (-1, 0, 0),
    "kcmp 312 272": (0, 0, 99, 0, 0),
    "keyctl 250 219": (999, 0, 0, 0, 0),
    "add_key 248 217": (0, 0, 0, 0, 0),
    "request_key 249 218": (0, 0, 0, 0),
    "bpf 321 280": (999, 0, 0),
    "perf_event_open 298 241": (0, 0, 0, 0, 0),
    "userfaultfd 323 282": (0x7FFF,),
    "io_uring_setup 425 425": (0, 0),
    "io_uring_enter 426 426": (-1, 0, 0, 0, 0, 0),
    "io_uring_register 427 427": (-1, 0, 0, 0),
    "io_setup 206 0": (0, 0),
    "kexec_load 246 104": (0, 0, 0, 0x7FFF),
    "init_module 175 105": (0, 0, 0),
    "finit_module 313 273": (-1, 0, 0),
    "delete_module 176 106": (0, 0),
    "reboot 169 142": (0, 0, 0, 0),
    "swapon 167 224": (0, 0),
    "swapoff 168 225": (0,),
    "syslog 103 116": (10, 0, 0),
    "acct 163 89": (1,),
    "quotactl 179 60": (0x7FFFFFFF, 0, 0, 0),
    "settimeofday 164 170": (1, 0),
    "clock_settime 227 112": (0, 0),
    "adjtimex 159 171": (0,),
    "clock_adjtime 305 266": (0, 0),
    "sethostname 170 161": (0, -1),
    "setdomainname 171 162": (0, -1),
    "modify_ldt 154 -": (99, 0, 0),
    "iopl 172 -": (0,),
    "ioperm 173 -": (0, 0, 0),
    "name_to_handle_at 303 264": (-1, 0, 0, 0, 0),
    "open_by_handle_at 304 265": (-1, 0, 0),
    "fanotify_init 300 262": (0x7FFFFFFF, 0),
    "memfd_secret 447 447": (0x7FFF,),
    "shmget 29 194": (0x5EC0, 0, 0),
    "shmat 30 196": (-1, 0, 0),
    "semget 64 190": (0x5EC0, 0, 0),
    "msgget 68 186": (0x5EC0, 0),
    "mq_open 240 180": (0, 0, 0, 0),
    "mbind 237 235": (0, 0, 99, 0, 0, 0),
    "migrate_pages 256 238": (-1, 0, 0, 0),
    "move_pages 279 239": (-1, 0, 0, 0, 0, 0),
    "mincore 27 232": (1, 0, 0),
    "vmsplice 278 75": (-1, 0, 0, 0),
    "tee 276 77": (-1, -1, 0, 0),
    "syncfs 306 267": (-1,),
}
NUMBERS = syscalls._parse("; ".join(REFUSED))
ARGUMENTS = {name.split()[0]: arguments for name, arguments in REFUSED.items()}


# the program, as the kernel would run it


def decide(program, number, args=(), arch=None, machine=MACHINE):
    """Run BPF on a call's description; a jump out of the program is an IndexError."""
    words = [value & (1 << 64) - 1 for value in (*args, *(0,) * (6 - len(args)))]
    arch = syscalls.ARCHES[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        elif code == 0x35:
            at += if_true if accumulator >= value else if_false
        elif code == 0x05:
            at += value
        else:
            assert code == 0x06
            return value


def by_rule(action, args):
    while not isinstance(action, int):
        word = args[action.arg] & action.mask & 0xFFFFFFFF
        action = action.listed if word in action.values else action.otherwise
    return action


def telling_arguments(action):
    """Give arguments of which each decides a rule another way, and some with the upper halves set."""
    found = [(0,) * 6, (0xFFFFFFFF,) * 6, (1 << 32,) * 6]
    while not isinstance(action, int):
        for base in list(found[:16]):
            for value in action.values:
                for word in (value, value + 1, value | 1 << 32, value | ~action.mask & 0xFFFFFFFF):
                    found.append((*base[: action.arg], word, *base[action.arg + 1 :]))
        action = action.otherwise if isinstance(action.listed, int) else action.listed
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_every_call_is_decided_as_the_table_and_the_rules_say(machine, variant):
    program = seccomp.build(**VARIANTS[variant], machine=machine)
    options = {"own_signals_only": False, "own_files_only": False, **VARIANTS[variant]}
    rules = seccomp._rules(**options)
    assert set(rules) <= set(syscalls.TABLE)
    names = {syscalls.number(name, machine): name for name in syscalls.TABLE}
    for number in range(syscalls.NEWEST + 1):
        action = rules.get(names[number], ALLOW) if number in names else EPERM
        for args in telling_arguments(action):
            assert decide(program, number, args, machine=machine) == by_rule(action, args), (number, args)
    for number in (syscalls.NEWEST + 1, 1000, 0x3FFFFFFF):
        assert decide(program, number, machine=machine) == seccomp.ENOSYS
    for number in (0x40000000, 0x40000001, 0x400001FF, 0x80000000, 0xFFFFFFFF):
        assert decide(program, number, machine=machine) == (KILL if machine == "x86_64" else seccomp.ENOSYS)
    other = next(arch for name, arch in syscalls.ARCHES.items() if name != machine)
    for arch in (other, 0x40000003, 0x40000028, 0):  # i386 and 32-bit arm among them
        assert {decide(program, number, arch=arch, machine=machine) for number in (0, 1, 20, 59)} == {KILL}


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_what_is_dangerous_is_in_no_table(machine):
    programs = [seccomp.build(**options, machine=machine) for options in VARIANTS.values()]
    for name, pair in NUMBERS.items():
        number = pair[syscalls.MACHINES.index(machine)]
        if number is not None:
            assert name not in syscalls.TABLE
            assert {decide(program, number, machine=machine) for program in programs} == {EPERM}, name


def test_no_two_names_have_one_number():
    for machine in syscalls.MACHINES:
        numbers = [n for name in syscalls.TABLE if (n := syscalls.number(name, machine)) is not None]
        assert len(numbers) == len(set(numbers))
        assert max(numbers) <= syscalls.NEWEST


def test_a_narrower_variant_allows_nothing_more():
    wide, *narrow = [seccomp.build(**options) for options in VARIANTS.values()]
    for number in range(syscalls.NEWEST + 1):
        for args in ((0,) * 6, (1,) * 6, (1, 1, 1, 0, 0, 0), (1, 5, 0, 0, 0, 0)):
            if decide(wide, number, args) != ALLOW:
                assert all(decide(program, number, args) != ALLOW for program in narrow), number


def test_an_unknown_machine_has_no_filter():
    with pytest.raises(OSError, match="riscv64"):
        seccomp.build(unix_sockets=False, machine="riscv64")


def test_it_is_small_enough_for_the_kernel_and_quick():
    for options in VARIANTS.values():
        assert len(seccomp.build(**options)) // 8 < 1024  # BPF_MAXINSNS is 4096


# the kernel, in children

CHILD = """
import ctypes, errno, json, os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
from jail import seccomp
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "ok"
def attempt(do, *args):
    try:
        do(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def fence():
    libc.prctl(38, 1, 0, 0, 0)
    seccomp.install(bytes.fromhex(sys.argv[2]), os.getpid())
"""


@pytest.fixture(scope="module")
def jail():
    """A copy of the package that every user can read: the tests' own directories are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="ct-jail-", dir="/tmp"))
    folder.chmod(0o755)
    shutil.copytree(Path(seccomp.__file__).parent, folder / "jail", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("self", "nobody"):
        (folder / name).mkdir()
    if ROOT:
        os.chown(folder / "nobody", NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def who():
    """Users and interpreters to run as: ourselves, and as root also somebody without any power."""
    return [
        "self",
        pytest.param("nobody", marks=pytest.mark.skipif(not ROOT, reason="only root can become another user")),
    ]


def child(jail, code, variant="unix sockets", *, user="self", check=True, **options):
    program = seccomp.build(**VARIANTS[variant])
    powers = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "nobody" else {}
    interpreter = DEBIAN if user == "nobody" else sys.executable
    done = subprocess.run(
        [interpreter, "-c", CHILD + code, str(jail), program.hex()],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=jail / user,
        env={**os.environ, "TMPDIR": str(jail / user)},
        **powers,
        **options,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def told(*args, **options):
    return json.loads(child(*args, **options).stdout)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("user", who())
def test_dangerous_calls_are_refused(jail, user, variant):
    column = syscalls.MACHINES.index(MACHINE)
    calls = {name: (pair[column], *ARGUMENTS[name]) for name, pair in NUMBERS.items() if pair[column] is not None}
    code = f"\ncalls = {calls!r}\ntry_all = lambda: {{name: call(*args) for name, args in calls.items()}}\n"
    code += "free = try_all(); fence(); print(json.dumps([free, try_all()]))"
    free, fenced = told(jail, code, variant, user=user)
    assert fenced == dict.fromkeys(calls, "EPERM")
    if user == "self" and ROOT:  # so it is the filter that refuses, and nothing else does
        assert {name for name, result in free.items() if result == "EPERM"} <= {"memfd_secret", "kexec_load"}


FLAGGED = """
fence()
NR = {name: number for name, number in json.loads(sys.argv[3]).items()}
import fcntl, mmap
r, w = os.pipe()
file = os.memfd_create("x")
a, b = socket.socketpair()
page = ctypes.create_string_buffer(8192)
results = {}
for family in range(46):
    for kind in (1, 2, 3, 5):
        results["socket %d %d" % (family, kind)] = call(NR["socket"], family, kind, 0)
for bit in range(8, 32):
    if bit in (15, 17, 25, 26, 27, 28, 29, 30):
        results["clone %d" % bit] = call(NR["clone"], 1 << bit | 17, 0, 0, 0, 0)
results["clone3"] = call(435, 0, 0)
for name, number in (("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TIOCSETD", 0x5423), ("FIOSETOWN", 0x8901),
                     ("SIOCSPGRP", 0x8902), ("TIOCSCTTY", 0x540E), ("FS_IOC_SETFLAGS", 0x40086602),
                     ("FIFREEZE", 0xC0045877), ("TIOCSTI, more above", 0x5412 | 1 << 32)):
    results[name] = call(NR["ioctl"], r, number, page)
for name, number in (("TCGETS", 0x5401), ("FIONREAD", 0x541B)):
    results[name] = call(NR["ioctl"], r, number, page)
results["F_SETLEASE"] = call(NR["fcntl"], file, 1024, 2)
results["F_NOTIFY"] = call(NR["fcntl"], file, 1026, 0)
results["huge mmap"] = call(NR["mmap"], 0, 1 << 21, 3, 0x40022, -1, 0)
results["huge memfd"] = call(NR["memfd_create"], b"x", 4)
results["merge"] = call(NR["madvise"], ctypes.addressof(page) & ~4095, 4096, 12)
results["filter of a socket"] = call(NR["setsockopt"], a.fileno(), 1, 26, page, 16)
results["listener"] = call(NR["seccomp"], 1, 8, page)
results["personality set"] = call(NR["personality"], 0x0040000)
results["personality asked"] = call(NR["personality"], 0xFFFFFFFF)
results["PR_SET_MM"] = call(NR["prctl"], 35, 1, 0, 0, 0)
results["PR_SET_PTRACER"] = call(NR["prctl"], 0x59616D61, -1, 0, 0, 0)
results["PR_SET_SPECULATION"] = call(NR["prctl"], 53, 0, 0, 0, 0)
results["device"] = attempt(os.mknod, "/tmp/ct-never", 0o060600, os.makedev(8, 0))
results["char device"] = attempt(os.mknod, "/tmp/ct-never", 0o020600, os.makedev(1, 3))
parent = os.getppid()
results["prlimit of the parent"] = call(NR["prlimit64"], parent, 7, 0, page)
results["prlimit of mine"] = call(NR["prlimit64"], 0, 7, 0, page)
results["affinity of the parent"] = attempt(os.sched_setaffinity, parent, os.sched_getaffinity(0))
results["affinity of mine"] = attempt(os.sched_setaffinity, 0, os.sched_getaffinity(0))
results["priority of the parent"] = attempt(os.setpriority, os.PRIO_PROCESS, parent, 19)
results["priority of the user"] = attempt(os.setpriority, os.PRIO_USER, 0, 19)
results["priority of mine"] = attempt(os.setpriority, os.PRIO_PROCESS, 0, 19)
print(json.dumps(results))
"""


def flagged(jail, variant, user):
    numbers = {name: syscalls.number(name) for name in syscalls.TABLE}
    code = FLAGGED.replace("json.loads(sys.argv[3])", repr(numbers))
    return told(jail, code, variant, user=user)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("user", who())
def test_calls_are_refused_by_their_arguments(jail, user, variant):
    results = flagged(jail, variant, user)
    unix = VARIANTS[variant]["unix_sockets"]
    allowed = {name for name in results if name.startswith("socket ") and name.split()[1] == "1"} if unix else set()
    sockets = {name: results.pop(name) for name in list(results) if name.startswith("socket ")}
    assert {name for name, result in sockets.items() if result != "EACCES"} == allowed
    fine = {"FIONREAD": "ok", "TCGETS": "ENOTTY", "personality asked": "ok", "clone3": "ENOSYS"}
    fine |= dict.fromkeys(("prlimit of mine", "affinity of mine", "priority of mine"), "ok")
    assert results == {**dict.fromkeys(results, "EPERM"), **fine}


SIGNALS = """
import fcntl, threading
r, w = os.pipe()
def start():
    pid = os.fork()
    if pid == 0:
        os.close(w)
        os.read(r, 1)  # until its parent is gone, however it went
        os._exit(0)
    return pid
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
others = {"child": start(), "parent": os.getppid()}
fence()
results = {name: [attempt(os.kill, pid, 0), attempt(os.pidfd_open, pid)] for name, pid in others.items()}
results["own"] = [attempt(os.kill, os.getpid(), signal.SIGUSR1), attempt(signal.raise_signal, signal.SIGUSR1)]
results["thread"] = [attempt(signal.pthread_kill, threading.get_ident(), signal.SIGUSR1)]
results["group"] = [attempt(os.kill, 0, 0), attempt(os.kill, -1, 0), attempt(os.kill, -os.getpgrp(), 0)]
results["owner"] = [attempt(fcntl.fcntl, r, number, 1) for number in (8, 10)]
print(json.dumps(results))
"""


@pytest.mark.skipif(sys.version_info < (3, 9), reason="os.pidfd_open")
@pytest.mark.parametrize("user", who())
def test_signals_reach_the_process_itself_only(jail, user):
    results = told(jail, SIGNALS, "own signals", user=user, start_new_session=True)
    assert results.pop("own") == ["ok", "ok"]
    assert results.pop("thread") == ["ok"]
    assert {result for each in results.values() for result in each} == {"EPERM"}


FILES = """
path = os.path.abspath("mine")
def make():
    with open(path, "w") as target:
        target.write("text")
def all_of_it():
    make()
    size = lambda: os.stat(path).st_size
    state = lambda: (os.stat(path).st_mode, os.stat(path).st_mtime)
    def changes(act, *args):
        before, result = state(), attempt(act, *args)
        return [result, state() != before]
    found = {
        "chmod": changes(os.chmod, path, 0o600), "fchmod": changes(os.chmod, os.open(path, os.O_RDONLY), 0o660),
        "utime": changes(os.utime, path, (0, 0)),
        "chown": attempt(os.chown, path, -1, -1), "truncate": attempt(os.truncate, path, 4),
    }
    watch = libc.inotify_init()
    ctypes.set_errno(0)
    added = libc.inotify_add_watch(watch, path.encode(), 2) > 0
    found["watch"] = "ok" if added else errno.errorcode[ctypes.get_errno()]
    for name, flags in (("read only", os.O_RDONLY), ("neither", 3), ("write", os.O_WRONLY), ("both", os.O_RDWR)):
        make()
        found["emptied by " + name] = [attempt(os.open, path, flags | os.O_TRUNC), size()]
    make()
    found["append"] = attempt(os.open, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return found
free = all_of_it(); fence(); print(json.dumps([free, all_of_it()]))
"""


@pytest.mark.parametrize("user", who())
def test_files_of_the_same_user_keep_their_modes_and_contents(jail, user):
    free, fenced = told(jail, FILES, "own files", user=user)
    written = {name: ["ok", 0] for name in ("emptied by write", "emptied by both")}
    spared = {name: ["EPERM", 4] for name in ("emptied by read only", "emptied by neither")}
    idle = {name: ["ok", False] for name in ("chmod", "fchmod", "utime")}
    assert fenced == {**dict.fromkeys(free, "EPERM"), **written, **spared, **idle, "append": "ok"}
    assert {str(result) for result in free.values()} == {"ok", "['ok', 0]", "['ok', True]"}


@pytest.mark.skipif(MACHINE != "x86_64", reason="a second calling convention")
@pytest.mark.parametrize("number", [0x40000000 + 39, 0x40000000 + 520])
def test_a_foreign_convention_ends_the_program(jail, number):
    assert child(jail, f"\nfence(); call({number})", check=False).returncode == -signal.SIGSYS


@pytest.mark.skipif(MACHINE != "x86_64", reason="a second calling convention")
def test_32_bit_calls_end_the_program(jail):
    code = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
getpid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
"""
    if child(jail, code + "getpid()", check=False).returncode != 0:
        pytest.skip("this kernel has no 32-bit calls")
    assert child(jail, code + "fence(); getpid()", check=False).returncode == -signal.SIGSYS


def test_it_holds_for_children_threads_and_programs_that_are_started(jail):
    code = f"""
import subprocess, threading
fence()
found = []
thread = threading.Thread(target=lambda: found.append(call({NUMBERS["unshare"][syscalls.MACHINES.index(MACHINE)]}, 0)))
thread.start(); thread.join()
found.append(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0)
more = seccomp.build(unix_sockets=True)
seccomp.install(more)  # a second one takes nothing back
found.append(call({NUMBERS["unshare"][syscalls.MACHINES.index(MACHINE)]}, 0))
print(json.dumps(found))
"""
    assert told(jail, code) == ["EPERM", True, "EPERM"]


ORDINARY = {
    "threads": """
import threading, queue, concurrent.futures as futures
assert list(futures.ThreadPoolExecutor(4).map(abs, range(-9, 0))) == list(range(9, 0, -1))
""",
    "subprocess": """
import subprocess
assert subprocess.getoutput("printf 'b\\na\\n' | sort | head -1 | tr a-z A-Z") == "A"
assert subprocess.run(["ls", "-l", "/usr"], capture_output=True).returncode == 0
assert subprocess.getoutput("tar -cf - -C /usr/share/base-files . | tar -tf - | head -1") == "./"
done = subprocess.run(["bash", "-c", "awk 'BEGIN{print 6*7}'; sed s/a/b/ <<< a; cp /etc/passwd p && cp p q &&"
    "find . -name 'p' | xargs cmp /etc/passwd; ls -l . > /dev/null; rm p q; sleep 0.01"], capture_output=True)
assert done.stdout == b"42\\nb\\n" and not done.stderr, done
""",
    "multiprocessing": """
import multiprocessing
def work(connection): connection.send(6 * 7)
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,)); process.start()
assert ours.recv() == 42
process.join(); assert process.exitcode == 0
spawning = multiprocessing.get_context("spawn")
process = spawning.Process(target=print, args=("spawned",)); process.start(); process.join()
assert process.exitcode == 0
assert spawning.Value("i", 7).value == 7
""",
    "asyncio": """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"hello")
    await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(50)), asyncio.to_thread(os.getpid))
    return out
assert asyncio.run(main()) == b"hello"
""",
    "files": """
import tempfile, pathlib, shutil, mmap, select, random, uuid, secrets, time
with tempfile.TemporaryDirectory() as name:
    place = pathlib.Path(name); (place / "a").write_text("x" * 5000); shutil.copyfile(place / "a", place / "b")
    (place / "c").symlink_to("a"); (place / "b").rename(place / "d"); os.mkfifo(place / "f")
    os.link(place / "a", place / "l")
    with open(place / "a", "r+b") as f: mmap.mmap(f.fileno(), 0)[:2]; f.truncate(7); os.fsync(f.fileno())
    assert sorted(os.listdir(place)) == ["a", "c", "d", "f", "l"]
rung = []; signal.signal(signal.SIGALRM, lambda *_: rung.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.001)
while not rung: time.sleep(0.01)
select.epoll().poll(0.001); os.urandom(8); uuid.uuid4(); secrets.token_hex(); time.sleep(0.001); os.sched_getaffinity(0)
assert not os.isatty(0)
""",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("user", who())
@pytest.mark.parametrize("program", ORDINARY)
def test_ordinary_programs_run(jail, program, user, variant):
    child(jail, "\nfence()\n" + ORDINARY[program], variant, user=user, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("variant", VARIANTS)
def test_numpy_runs(jail, variant):
    pytest.importorskip("numpy")
    code = """
fence()
import numpy as np, tempfile
matrix = np.random.default_rng(1).random((200, 200)); np.random.seed(1)
assert np.allclose(np.linalg.inv(matrix) @ matrix, np.eye(200))
np.linalg.svd(matrix), np.linalg.eig(matrix), np.fft.fft2(matrix), np.sort(np.random.rand(10**6))
with tempfile.TemporaryFile() as file:
    np.save(file, matrix); file.seek(0); assert (np.load(file) == matrix).all()
"""
    child(jail, code, variant)
