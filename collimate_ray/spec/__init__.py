"""Reward specs: what to run and how to judge it. Pure: no session, no process, no clock."""

from collimate_ray.spec.base import Case, Judgement, RewardSpec
from collimate_ray.spec.kinds import (
    AssertReward,
    PropertyReward,
    StdioReward,
    UnitTestReward,
    reward_spec_from_ground_truth,
)
from collimate_ray.spec.limits import checked_limits, effective_limits
from collimate_ray.spec.parse import as_spec, spec_from_dict
from collimate_ray.spec.program import runner_code, runner_source, runner_version
from collimate_ray.spec.report import Report, ReportMissing, read_report

#: Version of the in-session program.
RUNNER_VERSION = runner_version()

__all__ = [
    "RUNNER_VERSION",
    "AssertReward",
    "Case",
    "Judgement",
    "PropertyReward",
    "Report",
    "ReportMissing",
    "RewardSpec",
    "StdioReward",
    "UnitTestReward",
    "as_spec",
    "checked_limits",
    "effective_limits",
    "read_report",
    "reward_spec_from_ground_truth",
    "runner_code",
    "runner_source",
    "spec_from_dict",
]
