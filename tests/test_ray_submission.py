"""Arguments of a call: checked in the caller, seeds resolved, requests named. Ray-free."""

from __future__ import annotations

from typing import Any

import pytest

from collimate_ray.errors import ConfigError, SpecError
from collimate_ray.grader import get, start, stop
from collimate_ray.handle import GraderHandle
from collimate_ray.messages import SpecParcel, Submission
from collimate_ray.seeds import DET_SEED, is_valid_seed, seed_from_key
from collimate_ray.submission import make_submission, spec_of

SPEC = SpecParcel("h", {})
SEED = "ab" * 32


def make(completions: Any = ("a", "b"), **options: Any) -> Submission:
    return make_submission(completions, SPEC, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"completions": "text"}, "completions: expected a list of str, found str"),
        ({"completions": None}, "completions: expected a list of str, found NoneType"),
        ({"completions": ["a", 3]}, r"completions\[1\]: expected a str, found int 3"),
        ({"seeds": "often"}, "seeds: expected one of vanilla, crn, deterministic"),
        ({"seeds": [SEED]}, "seeds: expected a mode or a list of 2 seeds"),
        ({"seeds": [SEED, "xyz"]}, r"seeds\[1\]: expected 64 hex"),
        ({"base_seed": "12"}, "base_seed: expected 64 hex"),
        ({"group_id": ""}, "group_id: expected a str that is not empty"),
        ({"group_id": 7}, "group_id: expected a str"),
        ({"deadline_s": 0}, "deadline_s: expected a finite number above 0, found int 0"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"deadline_s": True}, "deadline_s"),
        ({"on_infra_error": "zero"}, "on_infra_error: expected 'raise' or 'mask', found str 'zero'"),
    ],
)
def test_wrong_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**options)


@pytest.mark.parametrize("limits", [{"time": 1}, {"time_s": 0}, {"time_s": "1"}, {"memory_mib": -1}])
def test_wrong_limits(limits: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="limits"):
        make(limits=limits)


def test_wrong_spec() -> None:
    with pytest.raises(ConfigError, match="spec: expected a RewardSpec or a dict"):
        spec_of("unit_tests")
    with pytest.raises(SpecError):
        spec_of({"kind": "no such kind"})


def test_seeds_of_each_mode() -> None:
    fresh = make().seeds
    assert len(set(fresh)) == 2
    assert all(map(is_valid_seed, fresh))
    assert len(set(make(seeds="crn").seeds)) == 1
    assert make(seeds="crn", group_id="g").seeds == (seed_from_key("g"),) * 2
    assert make(seeds="crn", group_id="g", base_seed=SEED).seeds == (SEED,) * 2
    assert make(seeds="deterministic").seeds == (DET_SEED,) * 2
    pinned = make(seeds=[SEED, None]).seeds
    assert pinned[0] == SEED
    assert is_valid_seed(pinned[1])


def test_same_work_has_the_same_key_whatever_seeds_are_drawn() -> None:
    assert make(group_id="g").key == make(group_id="g").key
    others = [
        make(group_id="h"),
        make(["a", "c"], group_id="g"),
        make(group_id="g", seeds="crn"),
        make(group_id="g", limits={"time_s": 1}),
        make(group_id="g", index=1),
        make_submission(("a", "b"), SpecParcel("other", {}), group_id="g"),
    ]
    assert len({submission.key for submission in [make(group_id="g"), *others]}) == 7


def test_unnamed_work_is_always_new() -> None:
    assert make().key != make().key
    assert not make().named
    assert make(group_id="g").named
    assert make([]).seeds == ()
    assert make(["\ud83d"], group_id="g").key  # a lone surrogate is text too


def test_without_ray() -> None:
    for call in (start, get, stop, lambda: GraderHandle().stats.remote()):
        with pytest.raises(ConfigError, match="Ray is not initialised"):
            call()
