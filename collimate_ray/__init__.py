"""collimate_ray: a Ray-distributed rollout grader for RL post-training.

::

    import ray, collimate_ray
    ray.init()
    grader = collimate_ray.start()
    group = ray.get(grader.grade_group.remote(completions, {"kind": "unit_tests", "tests": [...]}))
    group.rewards, group.valid, group.results

Without Ray: ``grade(connect(), "python", code, spec)``. Names that need Ray are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from collimate_ray.errors import (
    CheckerError,
    CollimateRayError,
    ConfigError,
    GraderClosed,
    GroupFailed,
    InfraError,
    NodeLost,
    Poison,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    SpecError,
    WireError,
)
from collimate_ray.extract import extract_code
from collimate_ray.results import CaseResult, GradeResult, GroupResult, Verdict
from collimate_ray.seeds import DET_SEED, fresh_seed, group_seeds, is_valid_seed, seed_from_key
from collimate_ray.spec import (
    AssertReward,
    PropertyReward,
    RewardSpec,
    StdioReward,
    UnitTestReward,
    reward_spec_from_ground_truth,
    spec_from_dict,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collimate_ray.grader import get, start, stop
    from collimate_ray.handle import GraderHandle
    from collimate_ray.sandbox import CollimateClient, SandboxClient, connect
    from collimate_ray.sandbox.grading import grade, grade_batch

#: Loaded at first use: Ray takes a third of a second to import, and the specs alone need neither it nor requests.
_LAZY = {
    "start": "collimate_ray.grader",
    "get": "collimate_ray.grader",
    "stop": "collimate_ray.grader",
    "GraderHandle": "collimate_ray.handle",
    "connect": "collimate_ray.sandbox",
    "SandboxClient": "collimate_ray.sandbox",
    "CollimateClient": "collimate_ray.sandbox",
    "grade": "collimate_ray.sandbox.grading",
    "grade_batch": "collimate_ray.sandbox.grading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


__all__ = [
    "DET_SEED",
    "AssertReward",
    "CaseResult",
    "CheckerError",
    "CollimateClient",
    "CollimateRayError",
    "ConfigError",
    "GradeResult",
    "GraderClosed",
    "GraderHandle",
    "GroupFailed",
    "GroupResult",
    "InfraError",
    "NodeLost",
    "Poison",
    "PropertyReward",
    "RewardSpec",
    "SandboxAtCapacity",
    "SandboxClient",
    "SandboxDraining",
    "SandboxUnavailable",
    "SessionLost",
    "SpecError",
    "StdioReward",
    "UnitTestReward",
    "Verdict",
    "WireError",
    "__version__",
    "connect",
    "extract_code",
    "fresh_seed",
    "get",
    "grade",
    "grade_batch",
    "group_seeds",
    "is_valid_seed",
    "reward_spec_from_ground_truth",
    "seed_from_key",
    "spec_from_dict",
    "start",
    "stop",
]
