"""Arguments of a call: checked in the caller, seeds resolved, requests named. Ray-free."""

from __future__ import annotations

import pickle
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collimate_ray.errors import ConfigError, SpecError
from collimate_ray.grader import get, start, stop
from collimate_ray.handle import GraderHandle
from collimate_ray.messages import SpecParcel, Submission
from collimate_ray.seeds import DET_SEED, is_valid_seed, seed_from_key
from collimate_ray.spec import as_spec
from collimate_ray.submission import make_single, make_submission, options_of

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
        ({"base_seed": SEED}, "base_seed: expected seeds='crn' or 'deterministic' with it, found seeds=None"),
        ({"base_seed": SEED, "seeds": "vanilla"}, "base_seed: .* found seeds='vanilla'"),
        ({"base_seed": SEED, "seeds": [SEED, None]}, r"base_seed: .* found seeds=\['abab"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"completion": None}, "completion: expected a str, found NoneType"),
        ({"index": -1}, "index: expected a whole number of at least 0, found int -1"),
        ({"seed": 42}, "^seed: expected 64 hex characters or None, found int 42"),
    ],
)
def test_wrong_argument_of_a_single_rollout_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_single(**{"completion": "a", "spec": SPEC, **options})


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ([], r"groups\[3\]: expected a dict with completions and spec, found list"),
        ({"completions": []}, r"groups\[3\]: expected a dict with completions and spec, found \['completions'\]"),
        ({"completions": [], "spec": {}, "seed": 1}, r"groups\[3\]: expected .* option of grade_group .* found 'seed'"),
    ],
)
def test_wrong_group_is_named(group: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options_of("groups[3]", group)


@pytest.mark.parametrize("limits", [{"time": 1}, {"time_s": 0}, {"time_s": "1"}, {"memory_mib": -1}])
def test_wrong_limits(limits: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="limits"):
        make(limits=limits)


def test_wrong_spec() -> None:
    with pytest.raises(ConfigError, match="spec: expected a RewardSpec or a dict"):
        as_spec("unit_tests")
    with pytest.raises(SpecError):
        as_spec({"kind": "no such kind"})


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


def test_wrong_names() -> None:
    with pytest.raises(ConfigError, match="handle_or_name: expected a GraderHandle or a name, found 5"):
        stop(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name: expected a str that is not empty, found int 5"):
        get(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s: expected a finite number above 0, found int -1"):
        get(timeout_s=-1)


@pytest.mark.parametrize("name", ["grade", "grade_group"])
def test_unknown_keyword_names_the_public_method(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^GraderHandle.{name}\(\) got an unexpected keyword argument 'nonsense'"):
        getattr(GraderHandle(), name).remote("a", {}, nonsense=1)


REMOTE_METHODS = ("grade", "grade_group", "grade_groups", "stats", "drain_node", "undrain_node", "cancel")


@pytest.mark.parametrize("name", REMOTE_METHODS)
def test_help_tells_everything(name: str) -> None:
    text = pydoc.render_doc(getattr(GraderHandle(), name), renderer=pydoc.plaintext)
    assert f"GraderHandle.{name}.remote(" in text
    assert "Returns:" in text
    assert "Raises:" in text
    assert "design/" not in text
    assert text.splitlines()[3].strip() in pydoc.render_doc(GraderHandle, renderer=pydoc.plaintext)


def test_a_method_travels_with_its_handle() -> None:
    method = pickle.loads(pickle.dumps(GraderHandle("other").grade))
    assert repr(method) == repr(GraderHandle().grade)
    assert method._call.__self__.name == "other"
    assert pickle.loads(pickle.dumps(method.remote)).__self__._call.__self__.name == "other"


TYPED = """
import ray
from collimate_ray import GraderHandle

grader = GraderHandle()
reveal_type(grader.grade.remote("a", {}, seed=None, index=1))
reveal_type(ray.get(grader.grade_group.remote(["a"], {}, seeds="crn", on_infra_error="mask")))
reveal_type(ray.get(grader.grade_groups.remote([{"completions": [], "spec": {}}])))
reveal_type(ray.get(grader.stats.remote()))
reveal_type(ray.get([grader.drain_node.remote("abcd"), grader.undrain_node.remote("abcd")]))
reveal_type(ray.get(grader.cancel.remote("g")))
grader.grade_group.remote(["a"], {}, seed="crn")
grader.grade.remote(3, {})
grader.grade.remote("a", {}, on_infra_error="zero")
grader.stats.remote(1)
"""


def test_types_of_calls_and_refs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*command, "--config-file", "", "script.py"],
        cwd=tmp_path,
        env={"PATH": "", "MYPYPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    notes = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    short = [note.replace("collimate_ray.results.", "").replace("builtins.", "") for note in notes]
    assert short[0].endswith("ObjectRef[GradeResult]")
    assert short[1:] == ["GroupResult", "list[GroupResult]", "dict[str, Any]", "list[str]", "int"]
    wrong = [line for line in done.stdout.splitlines() if line.startswith("script.py:") and ": error:" in line]
    assert [int(line.split(":")[1]) for line in wrong] == [12, 13, 14, 15], done.stdout
