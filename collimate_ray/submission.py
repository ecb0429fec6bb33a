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

from collimate_ray.errors import ConfigError, shown
from collimate_ray.messages import OnInfraError, SpecParcel, Submission
from collimate_ray.seeds import MODES, fresh_seed, group_seeds, is_valid_seed, seed_from_key
from collimate_ray.spec.limits import checked_limits

Seeds = str | Sequence[str | None] | None

#: The modes that give all members one seed.
_SHARED = ("crn", "deterministic")
#: What a group's dict may have besides ``completions`` and ``spec``.
_OPTIONS = ("seeds", "base_seed", "group_id", "limits", "deadline_s", "on_infra_error")


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
        base_seed: 64 hex characters; the shared seed of ``crn`` and ``deterministic``, and only with them.
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
    if group_id is not None:
        name_of("group_id", group_id)
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
        deadline_s=positive("deadline_s", deadline_s),
        on_infra_error=on_infra_error,
        single=index is not None,
        named=named,
    )


def make_single(
    completion: object,
    spec: SpecParcel,
    *,
    seed: str | None = None,
    group_id: str | None = None,
    index: int = 0,
    limits: Mapping[str, float] | None = None,
    deadline_s: float = 600.0,
    on_infra_error: OnInfraError = "raise",
) -> Submission:
    """Check the arguments of a call for a single rollout and put them together.

    Args:
        completion: Model text.
        spec: The spec, packed.
        seed: 64 hex characters, or None: a fresh one.
        group_id: See ``make_submission``.
        index: Place in the group, at least 0.
        limits: See ``make_submission``.
        deadline_s: See ``make_submission``.
        on_infra_error: See ``make_submission``.

    Raises:
        ConfigError: An argument is wrong; the text names it, what was found and what was expected.
        SpecError: A limit is.
    """
    if not isinstance(completion, str):
        raise ConfigError(f"completion: expected a str, found {_shown(completion)}")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(f"index: expected a whole number of at least 0, found {_shown(index)}")
    _check_seed("seed", seed)
    return make_submission(
        [completion],
        spec,
        seeds=[seed],
        group_id=group_id,
        index=index,
        limits=limits,
        deadline_s=deadline_s,
        on_infra_error=on_infra_error,
    )


def options_of(name: str, group: object) -> dict[str, Any]:
    """Check the names in a group's dict.

    Args:
        name: What to call it in an error.
        group: ``completions``, ``spec`` and any other argument of ``grade_group`` by name.

    Returns:
        A plain copy.

    Raises:
        ConfigError: It is no dict, ``completions`` or ``spec`` is missing, or a name is unknown.
    """
    if not isinstance(group, Mapping) or not {"completions", "spec"} <= group.keys():
        found = sorted(map(str, group)) if isinstance(group, Mapping) else type(group).__name__
        raise ConfigError(f"{name}: expected a dict with completions and spec, found {found}")
    for key in group:
        if key not in ("completions", "spec", *_OPTIONS):
            known = ", ".join(_OPTIONS)
            raise ConfigError(
                f"{name}: expected completions, spec or an option of grade_group ({known}), found {key!r}"
            )
    return dict(group)


def name_of(field: str, found: object) -> str:
    """Take a name: a str that is not empty.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(found, str) or not found:
        raise ConfigError(f"{field}: expected a str that is not empty, found {_shown(found)}")
    return found


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
    if base_seed is not None and not (isinstance(seeds, str) and seeds in _SHARED):
        modes = " or ".join(map(repr, _SHARED))
        raise ConfigError(f"base_seed: expected seeds={modes} with it, found seeds={shown(seeds)}")
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
        _check_seed(f"seeds[{index}]", seed)
    return list(seeds)


def _check_seed(name: str, seed: object) -> None:
    if seed is not None and not is_valid_seed(seed):
        raise ConfigError(f"{name}: expected 64 hex characters or None, found {_shown(seed)}")


def positive(name: str, found: object) -> float:
    """Take a finite number above 0.

    Raises:
        ConfigError: It is something else.
    """
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not number or not math.isfinite(found) or found <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{name}: expected a finite number above 0, found {_shown(found)}")
    return float(found)  # type: ignore[arg-type]


def _digest(*parts: object) -> str:
    """Name the work by its content. Seeds that are drawn anew are no part of it, so that a call sent again joins."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _shown(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"
