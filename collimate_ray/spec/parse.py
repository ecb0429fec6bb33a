"""From JSON to a spec, with one clear line for whatever is wrong. Source: design API, Spec JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from collimate_ray.errors import ConfigError, SpecError
from collimate_ray.spec.base import RewardSpec
from collimate_ray.spec.kinds import AssertReward, PropertyReward, StdioReward, UnitTestReward

#: Kinds by name.
KINDS: dict[str, type[RewardSpec]] = {
    spec.kind: spec for spec in (UnitTestReward, PropertyReward, StdioReward, AssertReward)
}


def as_spec(spec: object) -> RewardSpec:
    """Take a spec as it is, or make one of its JSON.

    Raises:
        ConfigError: It is neither.
        SpecError: The JSON is wrong.
    """
    if isinstance(spec, RewardSpec):
        return spec
    if not isinstance(spec, Mapping):
        raise ConfigError(f"spec: expected a RewardSpec or a dict, found {type(spec).__name__}")
    return spec_from_dict(spec)


def spec_from_dict(data: Any) -> RewardSpec:
    """Make a spec from its JSON; ``scoring`` defaults to ``all``.

    Args:
        data: ``{"kind": ..., ...}``.

    Raises:
        SpecError: The kind or a key is unknown, a key is missing, or a value is wrong; names it.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"spec: expected an object, found {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpecError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    made_of = fields(KINDS[kind])
    known = {one.name for one in made_of}
    for key in data:
        if key != "kind" and key not in known:
            raise SpecError(f"unknown key {key!r} of a {kind} spec; known are {', '.join(sorted(known))}")
    for one in made_of:
        if one.default is MISSING and one.default_factory is MISSING and one.name not in data:
            raise SpecError(f"{one.name} is missing from a {kind} spec")
    given = {key: value for key, value in data.items() if key != "kind"}
    return KINDS[kind](**{"scoring": "all", **given})
