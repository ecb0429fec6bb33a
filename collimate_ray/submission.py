"""From the arguments of a call to a ``Submission``: checks in the caller, seeds, the name of the request. Pure.

Must not know Ray: how a spec travels is the handle's. Source: design, API ("GraderHandle ... checks arguments in
the caller").
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from collimate_ray.errors import ConfigError
from collimate_ray.messages import OnInfraError, SpecParcel, Submission
from collimate_ray.seeds import MODES, fresh_seed, group_seeds, is_valid_seed, seed_from_key
from collimate_ray.spec import RewardSpec, spec_from_dict
from collimate_ray.spec.limits import checked_limits

Seeds = str | Sequence[str | None] | None


def spec_of(spec: object) -> RewardSpec:
    """Take a spec as it is, or make one from its JSON form.

    Raises:
        ConfigError: It is neither.
        SpecError: The JSON form is wrong.
    """
    if isinstance(spec, Mapping):
        return spec_from_dict(dict(spec))
    if isinstance(spec, RewardSpec):
        return spec
    raise ConfigError(f"spec: expected a RewardSpec or a dict, found {_shown(spec)}")


def make_submission(
    completions: object,
    spec: SpecParcel,
    *,
    seeds: Seeds = None,
    base_seed: str | None = None,
    group_id: str | None = None,
    index: int | None = None,
    limits: Mapping[str, float] | None = None,
    deadline_s: float = 600.0,
    on_infra_error: OnInfraError = "raise",
) -> Submission:
    """Check the arguments of a call and put them together.

    Args:
        completions: Shape (G,), model text.
        spec: The spec, packed.
        seeds: A mode of ``seeds.MODES``, shape (G,) of seeds (None: a fresh one), or None: a fresh one for each.
        base_seed: 64 hex characters; the shared seed of ``crn`` and ``deterministic``.
        group_id: Name of the group; the same name and work again joins or repeats the first answer.
        index: Place in the group, for a single rollout.
        limits: Limits over those of the spec, each above 0.
        deadline_s: Remaining time, s, above 0.
        on_infra_error: ``raise`` or ``mask``.

    Raises:
        ConfigError: An argument is wrong; the text names it, what was found and what was expected.
        SpecError: A limit is.
    """
    texts = _completions(completions)
    if group_id is not None and (not isinstance(group_id, str) or not group_id):
        raise ConfigError(f"group_id: expected a str that is not empty, found {_shown(group_id)}")
    if on_infra_error not in ("raise", "mask"):
        raise ConfigError(f"on_infra_error: expected 'raise' or 'mask', found {_shown(on_infra_error)}")
    pinned = _seeds(len(texts), seeds, base_seed, group_id)
    checked = checked_limits(limits or {})
    named = group_id is not None
    name = group_id if group_id is not None else uuid.uuid4().hex
    key = f"{name}/{_digest(spec.spec_hash, texts, pinned, checked, index)}" if named else name
    return Submission(
        group_id=name,
        key=key,
        completions=texts,
        spec=spec,
        seeds=tuple(seed or fresh_seed() for seed in pinned),
        limits=checked,
        deadline_s=_positive("deadline_s", deadline_s),
        on_infra_error=on_infra_error,
        single=index is not None,
        named=named,
    )


def _completions(found: object) -> tuple[str, ...]:
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise ConfigError(f"completions: expected a list of str, found {_shown(found)}")
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise ConfigError(f"completions[{index}]: expected a str, found {_shown(text)}")
    return tuple(found)


def _seeds(count: int, seeds: object, base_seed: str | None, group_id: str | None) -> list[str | None]:
    """Resolve seeds; None stays where a fresh one is to be drawn."""
    if base_seed is not None and not is_valid_seed(base_seed):
        raise ConfigError(f"base_seed: expected 64 hex characters, found {_shown(base_seed)}")
    if seeds is None:
        return [None] * count
    if isinstance(seeds, str):
        if seeds not in MODES:
            expected = ", ".join(MODES)
            raise ConfigError(f"seeds: expected one of {expected} or a list, found {_shown(seeds)}")
        if seeds == "crn" and base_seed is None and group_id is not None:
            base_seed = seed_from_key(group_id)
        return group_seeds(count, seeds, base_seed)
    if not isinstance(seeds, Sequence) or len(seeds) != count:
        raise ConfigError(f"seeds: expected a mode or a list of {count} seeds, found {_shown(seeds)}")
    for index, seed in enumerate(seeds):
        if seed is not None and not is_valid_seed(seed):
            raise ConfigError(f"seeds[{index}]: expected 64 hex characters or None, found {_shown(seed)}")
    return list(seeds)


def _positive(name: str, found: object) -> float:
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not number or not math.isfinite(found) or found <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{name}: expected a finite number above 0, found {_shown(found)}")
    return float(found)  # type: ignore[arg-type]


def _digest(*parts: object) -> str:
    """Name the work by its content. Seeds that are drawn anew are no part of it, so that a call sent again joins."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
