"""Landlock's rules in real children, for each version of the interface up to the kernel's own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from collimate_ray.jail import landlock

ROOT = os.getuid() == 0
DEBIAN = "/usr/bin/python3"
NOBODY = 65534
ABI = landlock.abi()

pytestmark = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")

CHILD = """
import ctypes, errno, json, os, signal, socket, stat, subprocess, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
from jail import landlock
libc = ctypes.CDLL(None, use_errno=True)
abi = landlock.abi(int(sys.argv[2]))
def attempt(do, *args, **options):
    try:
        do(*args, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def fence(**options):
    libc.prctl(38, 1, 0, 0, 0)
    system = ["/usr", "/lib", "/lib64", "/bin"]
    fd = landlock.make(system + ["read"], ["write", "more", "absent"], **{"scoped": True, "abi": abi, **options})
    landlock.restrict(fd)
    os.close(fd)
"""


def versions(least=1):
    return [
        pytest.param(abi, marks=pytest.mark.skipif(abi > ABI, reason=f"this kernel's Landlock has version {ABI}"))
        for abi in range(least, 8)
    ]


@pytest.fixture(params=["self", "nobody"])
def place(request):
    """A directory of the user who runs the children, with a copy of the package that this user can read."""
    if request.param == "nobody" and not ROOT:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="ct-land-", dir="/tmp"))
    shutil.copytree(Path(landlock.__file__).parent, folder / "jail", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("read", "write", "more", "outside"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("text")
        shutil.copy("/bin/true", folder / name / "program")
    if request.param == "nobody":
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def told(place, abi, code):
    nobody = ROOT and place.stat().st_uid == NOBODY
    powers = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if nobody else {}
    done = subprocess.run(
        [DEBIAN if nobody else sys.executable, "-c", CHILD + code, str(place), str(abi)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=place,
        **powers,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FILES = """
def everywhere(do):
    return {name: attempt(do, name) for name in ("read", "write", "outside")}
def write(name):
    with open(name + "/file", "r+") as file:
        file.write("more")
fence()
print(json.dumps({
    "read": everywhere(lambda name: open(name + "/file").read()),
    "list": everywhere(os.listdir),
    "execute": everywhere(lambda name: subprocess.run([name + "/program"], check=True)),
    "write": everywhere(write),
    "make": everywhere(lambda name: open(name + "/new", "x")),
    "mkdir": everywhere(lambda name: os.mkdir(name + "/dir")),
    "symlink": everywhere(lambda name: os.symlink("/etc", name + "/link")),
    "fifo": everywhere(lambda name: os.mkfifo(name + "/fifo")),
    "hard link": everywhere(lambda name: os.link(name + "/file", name + "/linked")),
    "rename": everywhere(lambda name: os.rename(name + "/program", name + "/renamed")),
    "socket": everywhere(lambda name: socket.socket(socket.AF_UNIX).bind(name + "/socket")),
    "remove": everywhere(lambda name: os.unlink(name + "/file")),
    "rmdir": everywhere(lambda name: os.rmdir(name + "/dir")),
}))
"""


@pytest.mark.parametrize("abi", versions())
def test_what_is_not_named_is_refused(place, abi):
    results = told(place, abi, FILES)
    for reading in ("read", "list", "execute"):
        assert results.pop(reading) == {"read": "ok", "write": "ok", "outside": "EACCES"}, reading
    assert results.pop("rmdir") in (
        {"read": "EACCES", "write": "ok", "outside": "EACCES"},
        {"read": "ENOENT", "write": "ok", "outside": "ENOENT"},
    )
    for changing, each in results.items():
        assert each == {"read": "EACCES", "write": "ok", "outside": "EACCES"}, changing
    assert (place / "outside" / "file").read_text() == (place / "read" / "file").read_text() == "text"


WAYS_OUT = """
os.symlink(os.path.abspath("outside"), "write/out")
inside = os.open("outside", os.O_PATH)
os.mkdir("write/dir")
fence()
print(json.dumps({
    "link": attempt(open, "write/out/file"),
    "dots": attempt(open, "write/../outside/file"),
    "magic link": attempt(open, "/proc/self/cwd/outside/file"),
    "descriptor": attempt(os.open, "file", os.O_RDONLY, dir_fd=inside),
    "descriptor's link": attempt(open, "/proc/self/fd/%d/file" % inside),
    "move out": attempt(os.rename, "write/file", "outside/moved"),
    "move in": attempt(os.rename, "outside/file", "write/moved"),
    "link in": attempt(os.link, "outside/file", "write/linked"),
    "link from what is read": attempt(os.link, "read/file", "write/linked"),
    "across": attempt(os.rename, "write/file", "more/moved"),
    "own": attempt(os.rename, "more/file", "more/moved"),
}))
"""


@pytest.mark.parametrize("abi", versions())
def test_no_link_and_no_rename_leads_out(place, abi):
    results = told(place, abi, WAYS_OUT)
    across = "ok" if abi >= 2 else "EXDEV"
    assert (results.pop("own"), results.pop("across")) == ("ok", across)
    assert set(results.values()) <= {"EACCES", "EXDEV"}, results


TRUNCATE = """
def emptied(name, do):
    return [attempt(do, name + "/file"), os.stat(name + "/file").st_size == 0]
fence()
places = ("write", "read", "outside")
print(json.dumps([{name: emptied(name, do) for name in places} for do in (
    lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    lambda path: os.truncate(path, 0),
    lambda path: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)),
    lambda path: os.close(os.open(path, 3 | os.O_TRUNC)),
)]))
"""


@pytest.mark.parametrize("abi", versions())
def test_nothing_else_is_emptied(place, abi):
    written, *strays = told(place, abi, TRUNCATE)
    spared = {"read": ["EACCES", False], "outside": ["EACCES", False]}
    assert written == {"write": ["ok", True], **spared}
    if abi >= 3:  # before, seccomp stands in: test_seccomp.py, "own files"
        assert strays == [{"write": ["ok", True], **spared}] * 3


DEVICES = """
import fcntl
def ioctl(path):
    fd = os.open(path, os.O_RDONLY)
    fcntl.ioctl(fd, 0x5401, bytes(64))  # TCGETS, which a device takes for its own
def write(path):
    with open(path, "wb", buffering=0) as file:
        file.write(b"x")
devices = ("/dev/null", "/dev/zero", "/dev/urandom")
before = [attempt(ioctl, path) for path in devices]
fence()
print(json.dumps({
    "read": [attempt(lambda: open(path, "rb").read(1)) for path in devices],
    "write": attempt(write, "/dev/null"),
    "full": attempt(write, "/dev/full"),
    "ioctl": [before, [attempt(ioctl, path) for path in devices]],
    "no null": attempt(subprocess.run, ["true"], stdout=subprocess.DEVNULL),
    "others": [attempt(open, path) for path in ("/dev/ptmx", "/dev/tty", "/dev") if os.path.exists(path)],
    "remove": attempt(os.unlink, "/dev/null"),
    "stat": stat.S_ISCHR(os.stat("/dev/null").st_mode),
}))
"""


@pytest.mark.parametrize("abi", versions())
def test_ordinary_devices_can_be_read_and_written_and_no_more(place, abi):
    results = told(place, abi, DEVICES)
    before, ioctls = results.pop("ioctl")
    assert ioctls == (["EACCES"] * 3 if abi >= 5 else before)
    assert "EACCES" not in before
    assert results.pop("read") == ["ok"] * 3
    assert set(results.pop("others")) == {"EACCES"}
    assert results == {"write": "ok", "full": "ENOSPC", "no null": "ok", "remove": "EACCES", "stat": True}


PROCESSES = """
r, w = os.pipe()
def start():
    pid = os.fork()
    if pid == 0:
        os.close(w)
        os.read(r, 1)  # until its parent is gone, however it went
        os._exit(0)
    return pid
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen(9)
outside = start()
ours, theirs = os.pipe()
pid = os.fork()
if pid == 0:
    if SCOPE_ONLY:
        fd = landlock.scope_only(abi)
        libc.prctl(38, 1, 0, 0, 0)
        if fd is not None:
            landlock.restrict(fd)
    else:
        fence(scoped=SCOPED)
    inside = start()
    within = socket.socket(socket.AF_UNIX)
    within.bind("\\0" + sys.argv[1] + "-inside")
    within.listen(1)
    results = {
        "signals": [attempt(os.kill, each, 0) for each in (os.getppid(), outside)],
        "own signals": [attempt(os.kill, each, 0) for each in (os.getpid(), inside)],
        "abstract": attempt(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[1]),
        "own abstract": attempt(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[1] + "-inside"),
        "files": attempt(open, "outside/file"),
        "tcp": attempt(socket.socket().bind, ("127.0.0.1", 0)),
    }
    os.write(theirs, json.dumps(results).encode())
    os._exit(0)
os.waitpid(pid, 0)
os.close(theirs)
print(os.read(ours, 65536).decode())
"""


@pytest.mark.parametrize("mode", ["scoped", "unscoped", "scope only"])
@pytest.mark.parametrize("abi", versions())
def test_processes_outside_are_out_of_reach_from_the_sixth_version_on(place, abi, mode):
    code = f"\nSCOPED, SCOPE_ONLY = {mode == 'scoped'}, {mode == 'scope only'}\n" + PROCESSES
    results = told(place, abi, code)
    fenced = abi >= 6 and mode != "unscoped"
    assert results.pop("signals") == ["EPERM" if fenced else "ok"] * 2
    assert results.pop("abstract") == ("EPERM" if fenced else "ok")
    assert results.pop("own signals") == ["ok", "ok"]
    assert results.pop("own abstract") == "ok"
    assert results.pop("files") == ("ok" if mode == "scope only" else "EACCES")
    assert results.pop("tcp") == ("EACCES" if abi >= 4 and mode != "scope only" else "ok")
    assert not results


SINGLE = """
fence()
narrow = landlock.make(["read/file"], ["write/file", "absent/file"], scoped=True, abi=abi)
landlock.restrict(narrow)
print(json.dumps([
    attempt(open, "read/file"), attempt(open, "read/file", "r+"), attempt(open, "read/program"),
    attempt(open, "write/file", "r+"), attempt(open, "write/program"), attempt(os.listdir, "write"),
]))
"""


@pytest.mark.parametrize("abi", versions())
def test_single_files_can_be_named(place, abi):
    assert told(place, abi, SINGLE) == ["ok", "EACCES", "EACCES", "ok", "EACCES", "EACCES"]


NESTED = """
fence()
narrow = landlock.make(["read"], ["write"], scoped=True, abi=abi)
landlock.restrict(narrow)
child = os.fork()
if child == 0:
    wide = landlock.make(["/"], ["/"], scoped=False, abi=abi)
    landlock.restrict(wide)  # takes nothing back
    print(json.dumps([attempt(os.listdir, name) for name in ("read", "write", "more", "outside", "/usr")]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("abi", versions())
def test_further_rules_only_narrow_and_children_inherit(place, abi):
    assert told(place, abi, NESTED) == ["ok", "ok", "EACCES", "EACCES", "EACCES"]


def test_the_version_can_be_limited_and_never_raised():
    assert [landlock.abi(limit) for limit in (0, 1, ABI, ABI + 5)] == [0, 1, ABI, ABI]
    assert landlock.scope_only(5) is None


def test_no_new_privs_is_needed(place):
    if ROOT and place.stat().st_uid != NOBODY:
        pytest.skip("root may do without")
    code = """
fd = landlock.make([], [], scoped=True, abi=abi)
print(json.dumps(attempt(landlock.restrict, fd)))
"""
    assert told(place, ABI, code) == "EPERM"


def test_a_failure_names_its_call(place):
    code = """
try:
    landlock.restrict(0)
except OSError as error:
    print(json.dumps(str(error)))
"""
    assert "landlock_restrict_self" in told(place, ABI, "\nlibc.prctl(38, 1, 0, 0, 0)" + code)
