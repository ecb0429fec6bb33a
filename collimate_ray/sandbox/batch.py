"""The answer of a batch: one JSON line an exec, as each ends. Source: design/WIRE.md, "exec-batch".

The second half of the wire boundary that stands in ``client.py``: whatever the stream raises becomes an outcome of each
exec that has none yet. Must not send or repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from collimate_ray.errors import CollimateRayError, SandboxUnavailable, WireError
from collimate_ray.sandbox.body import Json
from collimate_ray.sandbox.failures import decoded, told_refusal, transport_failure
from collimate_ray.sandbox.transport import Answer

Outcome = Json | CollimateRayError


class Lines:
    """Reads a batch's answer.

    Args:
        name: The request, for people.
        answer: The answer, open.
        count: Execs of the batch.
    """

    def __init__(self, name: str, answer: Answer, count: int) -> None:
        self._name, self._answer = name, answer
        #: indices without a line so far
        self._left = set(range(count))

    def read(self, patience_s: float, deadline: float | None) -> Iterator[tuple[int, Outcome]]:
        """Give each index once, those without a line last.

        Args:
            patience_s: Longest silence, s.
            deadline: Monotonic time past which nothing is waited for, s, or None.
        """
        lines = self._answer.lines(patience_s, deadline)
        while True:
            found = self._next(lines)
            if not isinstance(found, tuple):
                break
            yield found
        for index in sorted(self._left):
            yield index, found

    def _next(self, lines: Iterator[bytes]) -> tuple[int, Outcome] | CollimateRayError:
        """Give the next index and its outcome, or why there is none any more."""
        try:
            line = next(lines, None)
        except Exception as error:  # noqa: BLE001 - the wire boundary, as in client.py
            return transport_failure(self._name, error, False).error
        if line is None:
            return SandboxUnavailable(f"{self._name}: the answer ended without a line for this exec")
        try:
            return self._taken(decoded(self._name, line))
        except WireError as error:
            return error

    def _taken(self, line: Any) -> tuple[int, Outcome]:
        index = line.pop("index", None) if isinstance(line, dict) else None
        if type(index) is not int or index not in self._left:
            raise WireError(f"{self._name}: expected a line with the index of an exec that had none, found {index!r}")
        self._left.remove(index)
        return index, self._outcome(line)

    def _outcome(self, line: Json) -> Outcome:
        status = line.pop("http_status", None)
        try:
            if type(status) is not int:
                raise WireError(f"{self._name}: expected an http_status (whole number), found {status!r}")
            if 200 <= status < 300:
                return ran(self._name, line)
            return told_refusal(self._name, status, line, False).error
        except WireError as error:
            return error


def ran(name: str, answer: Any) -> Json:
    """Check an ExecResponse.

    Raises:
        WireError: It is none.
    """
    if not isinstance(answer, dict):
        raise WireError(f"{name}: expected an object, found {type(answer).__name__}")
    if not (isinstance(answer.get("stdout"), str) and type(answer.get("exit_code")) is int):
        raise WireError(f"{name}: expected stdout (text) and exit_code (whole number)")
    return answer
