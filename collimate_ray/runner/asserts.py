"""Test code that calls the candidate while both run: the one kind that is judged inside the session.

The test code runs here, in the keeper. It sees the prelude's names, and for every other free name a stand-in of the
candidate's; builtins are the keeper's own.
"""

from __future__ import annotations

import ast
import builtins
import faulthandler
import signal
from typing import Any

from collimate_ray.jail.pins import pin
from collimate_ray.runner.channel import TimeUp
from collimate_ray.runner.peer import FOREIGN, TEST_MODULE
from collimate_ray.runner.runs import Runs, Talk, failure

#: Seconds after the wall guard when a test that is stuck inside of C, where no signal's handler runs, is ended.
_STUCK_S = 5.0


class TestNames(dict):  # type: ignore[type-arg]
    """The globals of test code: what is missing is looked up in the candidate."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(__name__=TEST_MODULE, __builtins__=builtins)
        self._talk = talk

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        try:
            return self._talk.peer.operate("get", name)
        except NameError:
            raise KeyError(name) from None


def run_asserts(request: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Load the candidate and run the test code against it: one case."""
    try:
        tree = ast.parse(request["test_code"], "tests.py")
        compile(request["prelude"], "prelude.py", "exec")
    except (SyntaxError, ValueError) as error:
        return {"spec_error": "the test code or prelude does not compile: %s" % type(error).__name__}
    talk = Talk(runs)
    load = talk.load(request)
    if load["s"] != "ok":
        talk.close()
        return {"load": load, "cases": []}
    talk.renew()
    record = _shared(request, talk, tree) if request["shared"] else _separate(request, talk, tree)
    talk.close()
    return record if "spec_error" in record else {"load": load, "cases": [record]}


def _shared(request: dict[str, Any], talk: Talk, tree: ast.Module) -> dict[str, Any]:
    record = talk.ask("check", [request["test_code"], request["entry"], _wants_check(tree)])
    if record["s"] == "exc" and record["exc"][0] == "AssertionError":
        record["s"] = "fail"
    return record


def _separate(request: dict[str, Any], talk: Talk, tree: ast.Module) -> dict[str, Any]:
    names = TestNames(talk)
    pin(request["seed"])  # inputs that a test draws; the keeper draws nothing that is secret
    faulthandler.dump_traceback_later(talk.clock.wall_s + _STUCK_S, exit=True, file=2)
    signal.signal(signal.SIGALRM, _ring_for(talk))
    signal.setitimer(signal.ITIMER_REAL, talk.clock.wall_s)
    record: dict[str, Any]
    try:
        exec(compile(request["prelude"], "prelude.py", "exec"), names)
    except BaseException as error:
        return {"spec_error": "the prelude failed: %s" % type(error).__name__}
    try:
        names[request["entry"]] = talk.peer.operate("get", request["entry"])
        asked = talk.peer.asked
        exec(compile(tree, "tests.py", "exec"), names)
        if _wants_check(tree):
            names["check"](names[request["entry"]])
        record = {"s": "ok"}
    except BaseException as error:
        record = _ended_by(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if talk.peer.broke is not None:
        return talk.timed(talk.breakage())
    if record.get("s") == "ok" and talk.peer.asked == asked:
        return {"spec_error": "the test code ended without using the candidate: call it, or define check(candidate)"}
    return record if "spec_error" in record else talk.timed(record)


def _ended_by(error: BaseException) -> dict[str, Any]:
    """Record how an exception ended the test; one of the test's own is told from the candidate's."""
    own = FOREIGN not in getattr(error, "__dict__", {})
    if own and isinstance(error, SystemExit) and not error.code:
        return {"s": "ok"}  # as unittest.main() ends
    if own and isinstance(error, ImportError):
        return {"spec_error": "the test code imports what is not there: %s" % error.name}
    return {"s": "fail"} if isinstance(error, AssertionError) else failure(error)


def _ring_for(talk: Talk) -> Any:
    """Make the handler of the test's own wall guard: a test that hangs, in whichever code, is out of time."""

    def ring(signum: int, frame: Any) -> None:
        talk.peer.broke = TimeUp()
        raise talk.peer.broke

    return ring


def _wants_check(tree: ast.Module) -> bool:
    """Tell whether the test code defines ``check(candidate)`` and leaves the call to the grader."""
    blocks = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    top = [part for node in tree.body if not isinstance(node, blocks) for part in ast.walk(node)]
    calls = (part for part in top if isinstance(part, ast.Call) and isinstance(part.func, ast.Name))
    return defined and not any(call.func.id == "check" for call in calls)  # type: ignore[attr-defined]
