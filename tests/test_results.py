import inspect
import math
import pickle

import numpy as np
import pytest

from collimate_ray import errors, seeds
from collimate_ray.results import CaseResult, GradeResult, GroupResult, Verdict, infra_failure

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.CollimateRayError)]


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_survive_pickling(cls):
    error = cls("what", "n" * 56, False, True) if issubclass(cls, errors.InfraError) else cls("what")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_group_failed_carries_what_is_there():
    partial = GroupResult.of("g", [GradeResult(1.0)])
    back = pickle.loads(pickle.dumps(errors.GroupFailed("late", None, None, None, partial)))
    assert back.partial.rewards.tolist() == [1.0]


def test_refused_errors_say_so():
    assert not errors.SandboxDraining().admitted
    assert not errors.SandboxAtCapacity().admitted
    assert not errors.Poison().retriable
    assert errors.SandboxUnavailable().admitted


def test_group_result_masks_what_has_no_verdict():
    group = GroupResult.of("g", [GradeResult(1.0), infra_failure("NodeLost", seed="s"), GradeResult(0.5)])
    assert group.rewards.tolist() == [1.0, 0.0, 0.5]
    assert group.rewards.dtype == np.float32
    assert group.valid.tolist() == [True, False, True]
    assert group.results[1].infra_error
    assert group.results[1].reward is None


def test_advantages_are_over_valid_members():
    group = GroupResult.of("g", [GradeResult(1.0), infra_failure("NodeLost"), GradeResult(0.0)])
    assert group.advantages(scale=False).tolist() == [0.5, 0.0, -0.5]
    assert math.isclose(group.advantages()[0], 0.5 / (math.sqrt(0.5) + 1e-6), rel_tol=1e-6)
    assert GroupResult.of("g", [GradeResult(1.0), infra_failure("NodeLost")]).advantages().tolist() == [0.0, 0.0]


def test_feedback_hides_hidden_cases():
    cases = (
        CaseResult(0, Verdict.PASSED, got="1", expected="1", public=True),
        CaseResult(1, Verdict.FAILED, got="answer-7", expected="secret-9"),
    )
    shown = str(GradeResult(0.0, verdict=Verdict.FAILED, passed=1, total=2, cases=cases).feedback())
    assert "secret-9" not in shown
    assert "answer-7" not in shown
    assert "'got': '1'" in shown


def test_seeds():
    assert seeds.group_seeds(3, "vanilla") == [None] * 3
    assert seeds.group_seeds(2, "deterministic") == [seeds.DET_SEED] * 2
    drawn = seeds.group_seeds(2)
    assert drawn[0] == drawn[1]
    assert seeds.is_valid_seed(drawn[0])
    assert seeds.group_seeds(1, "crn", "AB" * 32) == ["AB" * 32]
    assert seeds.seed_from_key("k") == seeds.seed_from_key("k") != seeds.seed_from_key("k", "epoch 2")
    assert not seeds.is_valid_seed("ab" * 32 + "\n")


@pytest.mark.parametrize("call", [(-1, "crn", None), (2, "odd", None), (2, "crn", "xyz")])
def test_bad_seeds_are_one_line(call):
    with pytest.raises(errors.ConfigError, match="expected"):
        seeds.group_seeds(*call)


def test_seed_names_agree_with_the_published_sdk():
    sdk = pytest.importorskip("collimate_rl")
    assert sdk.DET_SEED == seeds.DET_SEED
    assert sdk.seed_from_key("prompt 1", "s") == seeds.seed_from_key("prompt 1", "s")
