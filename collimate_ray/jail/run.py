"""An exec's process: parked until the daemon's word, then fenced in, then it becomes what the request says.

Whatever can be done before the request comes is done before it. The daemon hears ``began`` when the fence stands:
before it a failure is the daemon's, after it the exec's. The one catch-all stands around the candidate's code, and does
what an interpreter does with what its program lets out. Must not judge. Sources: design/DESIGN.md ("Verdicts"),
CPython's ``pylifecycle.c`` for the order of what happens at exit.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import types
from typing import Any, Callable, Dict, List, Optional

from . import kernel, landlock, rootfs, seccomp
from .pins import pin
from .process import die_with_parent, drop_capabilities, drop_to, no_new_privs, set_dumpable, set_limits


class Place:
    """Where and how the execs of a session run.

    Args:
        setup: The zygote's set-up.
        message: The daemon's order for this session.
        join_fds: Files of cgroups: a process joins by writing to them.
    """

    def __init__(self, setup: Dict[str, Any], message: Dict[str, Any], join_fds: List[int]) -> None:
        self.tier: str = setup["tier"]
        self.namespaces: bool = setup["namespaces"]
        self.setup = setup
        #: the slot's own uid, or None: the daemon's
        self.uid: Optional[int] = message["uid"]
        self.join_fds = join_fds
        self.has_proc = True
        self.work: str = rootfs.WORK if self.namespaces else message["work"]
        self.tmp: str = "/tmp" if self.namespaces else message["tmp"]
        #: the daemon's user became another one, whom no other session has
        self.drops = self.uid is not None and self.tier != "userns"


def park(sock: socket.socket, place: Place) -> None:
    """Wait for the daemon's word, and become an exec. Never returns."""
    die_with_parent()
    kernel.send(sock, {"parked": True, "proc": place.has_proc})
    header, fds = kernel.receive(sock)
    if header is None:
        os._exit(0)
    request_fd = fds[0]
    for number, fd in enumerate((fds[2], fds[1], fds[1])):
        os.dup2(fd, number)
    kind = header["kind"]
    _join_and_drop(header, place)
    with open(request_fd, "rb", closefd=False) as text:
        request: Dict[str, Any] = json.loads(text.read() or b"{}")
    made = [] if place.namespaces or kind == "runner" else _make_in_tmp(request.get("files", []))
    _restrict(place, kind == "runner", made)
    pins = [] if kind in ("command", "argv") else pin(header["seed"])
    if not place.namespaces:  # else the zygote's are everybody's
        os.environ.update(HOME=place.work, TMPDIR=place.tmp)
    os.environ["COLLIMATE_SEED"] = header["seed"]
    for fd in fds:
        os.close(fd)
    kernel.send(sock, {"began": True, "pins": pins, "made": made})
    os.close(sock.detach())
    _write_files(request.get("files", []), place, kind)
    gc.enable()
    if kind == "runner":
        _run_runner(place)
    elif kind == "code":
        _run_code(request["text"])
    else:
        _become(_with_code(request) if "code" in request else request["argv"])


def _join_and_drop(header: Dict[str, Any], place: Place) -> None:
    for fd in place.join_fds:
        os.write(fd, b"0")
        os.close(fd)
    limits = header["limits"]
    set_limits(**limits, own_uid=place.uid is not None)
    if header["cpu_s"] is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (header["cpu_s"], header["cpu_s"] + 1))
    _drop(place, header["kind"] == "runner")
    die_with_parent()  # a change of uid took it back


def _make_in_tmp(files: List[List[str]]) -> List[str]:
    """Make a request's files that stand in ``/tmp`` itself, where that is everybody's: clients name some there.

    The session's rules then allow these and no others; the daemon removes them after the exec. What is there already
    is not ours.
    """
    made = []
    for path, _ in files:
        if os.path.dirname(path) == "/tmp":
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
                made.append(path)
            except OSError:
                continue  # it can't be written later either, and that is told
    return made


def _drop(place: Place, is_runner: bool) -> None:
    """Give up the daemon's powers; the runner's keeper keeps what it needs to make a candidate another user."""
    if place.drops and is_runner:
        os.environ["COLLIMATE_CANDIDATE_UID"] = str(place.uid)
    elif place.drops:
        assert place.uid is not None
        drop_to(place.uid)
    else:
        drop_capabilities()
        set_dumpable()


def _restrict(place: Place, is_runner: bool, made: List[str]) -> None:
    """Add Landlock and seccomp, as far as the tier goes."""
    setup = place.setup
    no_new_privs()
    if place.namespaces and setup["landlock_abi"]:
        _scope(setup["landlock_abi"])
    elif place.tier == "landlock":
        _landlock(place, is_runner, made)
    if place.tier == "rlimits":
        return
    seccomp.install(setup["keeper_filter" if is_runner else "filter"], os.getpid())
    if is_runner and setup["filter"] != setup["keeper_filter"]:
        _fences().append(lambda: seccomp.install(setup["filter"], os.getpid()))


def _fences() -> List[Callable[[], None]]:
    """Give what the runner puts its candidates behind."""
    fences: List[Callable[[], None]] = sys.modules["collimate_runner"].FENCES
    return fences


def _scope(abi: int) -> None:
    """Cut the session's sockets off from those of other sessions of the same zygote, whose network they share."""
    handle = landlock.scope_only(abi)
    if handle is not None:
        landlock.restrict(handle)
        os.close(handle)


def _landlock(place: Place, is_runner: bool, made: List[str]) -> None:
    """Enter the session's domain; the runner's keeper reads /proc for its clocks, its candidates do not."""
    read, abi = [*rootfs.readable(), *place.setup["read"]], place.setup["landlock_abi"]
    narrow = landlock.make(read, [place.work, place.tmp, *made], scoped=True, abi=abi)
    if not is_runner:
        landlock.restrict(narrow)
        os.close(narrow)
        return
    keeper = landlock.make([*read, "/proc"], [place.work, place.tmp], scoped=True, abi=abi)
    landlock.restrict(keeper)
    os.close(keeper)
    _fences().append(lambda: landlock.restrict(narrow))


def _write_files(files: List[List[str]], place: Place, kind: str) -> None:
    """Write the request's files as the session's user: its links may point anywhere."""
    as_user = place.uid if files and place.drops and kind == "runner" else None
    if as_user is not None:
        os.setegid(as_user)
        os.seteuid(as_user)
    try:
        for path, content in files:
            _write_file(path, content)
    except (OSError, ValueError) as error:
        _die("collimate: a file of the request can't be written: %s" % error)
    if as_user is not None:
        os.seteuid(0)
        os.setegid(0)


def _write_file(path: str, content: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as target:
        target.write(content.encode("utf-8", "surrogatepass"))


def _die(line: str) -> None:
    os.write(2, line.encode("utf-8", "replace") + b"\n")
    os._exit(1)


def _run_runner(place: Place) -> None:
    sys.modules["collimate_runner"].main()
    sys.stdout.flush()
    os._exit(0)


def _with_code(request: Dict[str, Any]) -> List[str]:
    """Hand the code to a foreign interpreter: in a file where its command line asks for one, else as its input."""
    path = os.path.join(os.getcwd(), "code")
    _write_file(path, request["code"])
    argv: List[str] = request["argv"]
    if not any("{file}" in word for word in argv):
        os.dup2(os.open(path, os.O_RDONLY), 0)
    return [word.replace("{file}", path) for word in argv]


def _become(argv: List[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and ignoring is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        _die("collimate: %s: %s" % (argv[0], os.strerror(error.errno or 0)))


def _run_code(text: str) -> None:
    """Run a program as ``python -c`` would, and end as it would."""
    sys.argv = ["-c"]
    sys.path.insert(0, os.getcwd())
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(text, "<string>", "exec"), main.__dict__)
    except SystemExit as error:
        status = _exit_status(error.code)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
    _finish(main, status)


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    sys.stderr.write("%s\n" % (code,))
    return 1


def _finish(main: types.ModuleType, status: int) -> None:
    """Do what an interpreter does at its end, and leave out what only costs time: tearing its own modules down."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120  # as an interpreter whose output can't be written
    main.__dict__.clear()  # objects say their last words
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    os._exit(status)
