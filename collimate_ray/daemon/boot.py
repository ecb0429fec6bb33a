"""The program that each exec's process starts as: fence itself in, write the files, become the exec.

Copied as text into the daemon's private directory and run there with the interpreter's ``-I``, so: standard library
only, nothing of ours imported (the fence, ``jail/process.py``, is handed in). Must not judge, talk to the daemon, or
keep anything of the request. A byte on the ready pipe says that the fence stands: before it a failure is the daemon's,
after it the exec's. Source: design/DESIGN.md, "Verdicts" and "Ray" (nice 10, oom_score_adj 1000).
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys
from types import ModuleType, TracebackType
from typing import Any

#: Sessions yield the processor to the trainer (design: Ray).
_NICE = 10


def main(jail: Any, request_fd: int, ready_fd: int) -> None:
    """Be one exec.

    Args:
        jail: The module ``jail/process.py`` under the name it was copied to.
        request_fd: Where the request stands, marshalled by the daemon (same interpreter); read to its end.
        ready_fd: Gets one byte when the fence stands.

    Raises:
        SystemExit: The exec could not start, after its text went to the output.
    """
    with os.fdopen(request_fd, "rb") as source:
        request = marshal.load(source)
    runner = _import_runner() if request["kind"] == "runner" else None
    del sys.path[0]  # where this file stands
    _yield_to_trainer()
    _fence(jail, request, runner is not None)
    os.write(ready_fd, b"1")
    os.close(ready_fd)
    try:
        _write_files(request.pop("files"), request["uid"] if runner is not None else None)
    except (OSError, ValueError) as error:
        raise SystemExit(f"collimate: a file of the request can't be written: {error}") from None
    if runner is not None:
        runner.main()
    elif request["kind"] == "command":
        _become_shell(request["text"])
    else:
        _run_code(request.pop("text"), int(request["seed"], 16))


def _import_runner() -> Any:
    import collimate_runner  # type: ignore[import-not-found]  # written beside this file by the daemon

    return collimate_runner


def _yield_to_trainer() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with open("/proc/self/oom_score_adj", "w") as adjust:
        adjust.write("1000")


def _fence(jail: Any, request: dict[str, Any], is_runner: bool) -> None:
    mode, uid = request["mode"], request["uid"]
    os.umask(0o022)
    if mode == "mounts" and not jail.private_mounts(request["tmp"], request["keep"], request["work"]):
        raise SystemExit("collimate: the mount namespace was refused")
    os.chdir(request["work"])
    jail.set_limits(**request["limits"], own_uid=uid is not None)
    if request["cpu_s"] is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))
    if mode == "caps":
        jail.drop_capabilities()
    elif uid is None:
        jail.no_new_privs()
    elif not is_runner:  # the runner's keeper stays root: the candidate that it forks drops to the uid
        jail.drop_to(uid)
    jail.die_with_parent()
    if os.getppid() != request["parent"]:
        raise SystemExit("collimate: the daemon is gone")


def _write_files(files: list[tuple[str, bytes]], uid: int | None) -> None:
    """Write the request's files, as the session's uid, whose links may point anywhere."""
    if uid is not None:
        os.setegid(uid)
        os.seteuid(uid)
    for path, content in files:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as target:
            target.write(content)
    if uid is not None:
        os.seteuid(0)
        os.setegid(0)


def _become_shell(script: str) -> None:
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and ignoring is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp("sh", ["sh", "-c", script])
    except OSError as error:
        raise SystemExit(f"collimate: sh: {error.strerror}") from None


def _run_code(text: str, seed: int) -> None:
    import random

    random.seed(seed)
    sys.argv = [""]
    sys.path.insert(0, os.getcwd())
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.excepthook = _show_error
    exec(compile(text, "<string>", "exec"), vars(module))


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught error as a plain interpreter would, without the frames of the way here."""
    frame, last_ours = trace, None
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            last_ours = frame
        frame = frame.tb_next
    trace = trace if last_ours is None else last_ours.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
