"""What a grade says of its seed and its session is what the daemon said, on a real daemon."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from collimate_ray.errors import SessionLost
from collimate_ray.sandbox import SandboxClient
from collimate_ray.sandbox.grading import grade
from collimate_ray.seeds import DET_SEED
from collimate_ray.spec import UnitTestReward

SPEC = UnitTestReward([{"input": [2], "expected": 8}], "cube")
CODE = "def cube(n): return n ** 3"


class Retelling(SandboxClient):
    """Changes fields of the daemon's answers; None takes one out."""

    changes: ClassVar[dict[str, Any]] = {}

    def exec_once(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        told = {**super().exec_once(*args, **kwargs), **self.changes}
        return {name: value for name, value in told.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "acknowledged"),
    [
        ({}, "verified"),
        ({"seed_ack": "off"}, "off"),
        ({"seed_ack": None}, "no-ack"),
        ({"seed": DET_SEED.upper()}, "verified"),
        ({"seed": "cd" * 32}, "no-ack"),  # another one was pinned
        ({"seed": None}, "no-ack"),
    ],
)
def test_seed_is_acknowledged_only_where_the_daemon_did(
    daemon: Any, changes: dict[str, Any], acknowledged: str
) -> None:
    with Retelling(unix_socket=daemon.socket) as client:
        client.changes = changes
        result = grade(client, "python", CODE, SPEC, seed=DET_SEED)
    assert (result.reward, result.seed, result.seed_ack) == (1.0, DET_SEED, acknowledged)


def test_pins_that_the_daemon_names_bear_out_its_acknowledgement(daemon: Any) -> None:
    with SandboxClient(unix_socket=daemon.socket) as client:
        result = grade(client, "python", CODE, SPEC, seed=DET_SEED)
    assert result.seed_ack == "verified"
    assert {"random", "urandom"} <= set(result.raw["seed_pins"])


def test_blank_candidate_has_no_acknowledgement(daemon: Any) -> None:
    with SandboxClient(unix_socket=daemon.socket) as client:
        assert grade(client, "python", " ", SPEC, seed=DET_SEED).seed_ack is None


def test_callers_session_that_is_gone_is_no_verdict(daemon: Any) -> None:
    with SandboxClient(unix_socket=daemon.socket) as client:
        session = client.create_session("python")["session_id"]
        client.delete_session(session)
        for name in (session, "never-was"):
            with pytest.raises(SessionLost):
                grade(client, "python", CODE, SPEC, session_id=name)
