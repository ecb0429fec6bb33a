"""The candidate's process: loads untrusted code and answers calls, or runs it as a program.

Everything here shares one interpreter with hostile code, so nothing here decides anything: what leaves this process is
the candidate's answer, whoever wrote it. The catch-alls stand around the candidate's code only.
"""

from __future__ import annotations

import io
import os
import sys
import types
from typing import Any

from collimate_ray.runner.channel import Channel, Gone
from collimate_ray.runner.peer import OBJECT_OPS, Peer

#: The name under which a candidate's module is registered: pickle and dataclasses look it up.
_MODULE = "candidate"


def load_source(namespace: dict[str, Any], source: str, path: str) -> None:
    """Run source text in a namespace, as a file would run."""
    exec(compile(source.lstrip("\ufeff"), path, "exec"), namespace)


class Loaded:
    """A candidate's module and how its names are found."""

    def __init__(self) -> None:
        self.module = types.ModuleType(_MODULE)
        self.names = self.module.__dict__
        self.entry = ""

    def prepare(self, prelude: str) -> None:
        """Run the spec's own prelude."""
        sys.modules[_MODULE] = sys.modules["__main__"] = self.module
        sys.path.insert(0, os.getcwd())  # a process that it spawns imports it again
        load_source(self.names, prelude, "prelude.py")

    def load(self, source: str, entry: str) -> bool:
        """Run the candidate's source; tell whether the entry is there."""
        path = os.path.abspath("candidate.py")
        _keep_source(path, source)
        self.names["__file__"] = path
        self.entry = entry
        load_source(self.names, source, path)
        return not entry or entry in self.names or hasattr(self.names.get("Solution"), entry)

    def find(self, name: str) -> Any:
        """Find a name of the module; the entry may be a method of ``class Solution``."""
        if name == self.entry and name not in self.names:
            return getattr(self.names["Solution"](), name)
        if name not in self.names:
            raise NameError("name %r is not defined" % name)
        return self.names[name]

    def check(self, test_code: str, entry: str, call_check: bool) -> None:
        """Run test code beside the candidate: only where the spec gave up separation."""
        load_source(self.names, test_code, "tests.py")
        if call_check:
            self.names["check"](self.find(entry))


def _keep_source(path: str, source: str) -> None:
    """Leave the source as a file: tracebacks and ``inspect`` look there."""
    try:
        with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as out:
            out.write(source)
    except OSError:
        return  # a full disk costs the file, not the grade


def serve_candidate(read_fd: int, write_fd: int) -> None:
    """Answer the keeper until it hangs up."""
    loaded = Loaded()
    offered = dict(OBJECT_OPS)
    offered["prepare"] = lambda _, *args: loaded.prepare(*args)
    offered["load"] = lambda _, *args: loaded.load(*args)
    offered["check"] = lambda _, *args: loaded.check(*args)
    peer = Peer(Channel(read_fd, write_fd), offered, loaded.find)
    while True:
        try:
            message = peer.channel.recv()
        except Gone:
            os._exit(0)
        peer.answer(message)


def run_program(note_fd: int) -> None:
    """Run ``candidate.py`` of the working directory as ``__main__``; the interpreter then ends as it always does.

    Raises:
        SystemExit: Always: the program's own, or status 1 for what it did not catch.
    """
    path = os.path.abspath("candidate.py")
    source, prelude = _read_source(path), _read_source("prelude.py")
    _fresh_streams()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    try:
        load_source(main.__dict__, prelude, "prelude.py")
    except BaseException:
        os.write(note_fd, b"P")
        raise SystemExit(1) from None
    os.write(note_fd, b".")  # the first byte is the prelude's: whatever the candidate writes comes after
    try:
        load_source(main.__dict__, source, path)
    except SystemExit:
        raise
    except MemoryError:
        os.write(note_fd, b"M")
        raise SystemExit(1) from None
    except BaseException:
        raise SystemExit(1) from None
    raise SystemExit(0)


def _read_source(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogatepass", newline="") as text:
        return text.read()


def _fresh_streams() -> None:
    """Text streams over the program's own descriptors, UTF-8 whatever the locale."""
    kind: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin = open(0, **kind)
    sys.stdout = open(1, "w", **kind)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.__dict__.update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
