"""What the actors say to each other: submissions, shards, outcomes, states. Plain records, picklable, Ray-free.

Must not hold a reference into Ray except the one of a spec (``SpecParcel.ref``), and no behaviour. Source: design,
Ray. Deadlines here are *remaining* seconds, since they cross a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from collimate_ray.results import GradeResult

OnInfraError = Literal["raise", "mask"]

#: A dispatched candidate: group key, index, attempt.
JobKey = tuple[str, int, int]


@dataclass(frozen=True)
class GraderConfig:
    """How a grader was started; the first ``start()`` of a name decides.

    Attributes:
        name: The grader's actor name.
        namespace: Namespace of all its actors.
        daemon: ``auto``, ``embedded``, a socket path or a URL.
        template: Template for specs that name none.
        slots: Candidates that a node grades at once; None: half the host's cores x 4, shared by its raylets.
        memory_mib: Bound of the embedded daemon's session limits together, MiB; None: its default.
        node_label: ``key`` or ``key=value`` that a node must carry, or None: all nodes.
        require_tier: Isolation tier that a node's daemon must have, or None.
        idle_timeout_s: The grader ends itself after so long without a call, s.
    """

    name: str = "grader"
    namespace: str = "collimate"
    daemon: str = "auto"
    template: str = "python"
    slots: int | None = None
    memory_mib: int | None = None
    node_label: str | None = None
    require_tier: str | None = None
    idle_timeout_s: float = 3600.0


@dataclass(frozen=True)
class SpecParcel:
    """A spec on its way from a handle to the grader.

    Attributes:
        spec_hash: Names the spec.
        data: ``spec.to_dict()`` of a small spec, else None.
        ref: For a big spec, its dict in the object store, boxed in a tuple so that Ray does not fetch it.
    """

    spec_hash: str
    data: Mapping[str, Any] | None = None
    ref: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Submission:
    """A group to grade.

    Attributes:
        group_id: The caller's name for it, or a fresh one.
        key: Name of the request among all: the same key means the same work.
        named: The caller chose the name, so that it may ask for the same work again.
        completions: Shape (G,), model text.
        spec: What to run and how to judge it.
        seeds: Shape (G,), 64 hex characters each.
        limits: Limits of the call, over those of the spec.
        deadline_s: Remaining time, s.
        on_infra_error: ``raise`` or ``mask``.
        single: A single rollout, to be placed together with others.
    """

    group_id: str
    key: str
    completions: tuple[str, ...]
    spec: SpecParcel
    seeds: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    deadline_s: float = 600.0
    on_infra_error: OnInfraError = "raise"
    single: bool = False
    named: bool = False


@dataclass(frozen=True)
class ShardItem:
    """One candidate of a shard.

    Attributes:
        key: Group key, index and attempt; an outcome carries it back.
        completion: Model text.
        seed: 64 hex characters.
    """

    key: JobKey
    completion: str
    seed: str


@dataclass(frozen=True)
class Terms:
    """What the items of one group have in common.

    Attributes:
        spec_hash: Names the spec.
        limits: Limits of the call.
        deadline_s: Remaining time, s.
    """

    spec_hash: str
    limits: Mapping[str, float]
    deadline_s: float


@dataclass(frozen=True)
class Shard:
    """Work for a node, in one call.

    Attributes:
        incarnation: Life of the node actor that it is meant for; another life refuses it.
        items: The candidates.
        terms: By group key.
        specs: By hash, those that the node does not have yet.
    """

    incarnation: str
    items: tuple[ShardItem, ...]
    terms: Mapping[str, Terms]
    specs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """A node's answer for one candidate: exactly one of ``result`` and ``error``.

    Attributes:
        key: Group key, index and attempt.
        result: The grade, or None.
        error: One of errors.py, or None.
    """

    key: JobKey
    result: GradeResult | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class NodeState:
    """How a node is.

    Attributes:
        incarnation: Life of the node actor.
        version: Grows with each change of what follows, from 1.
        slots: Candidates that it grades at once, at least 1.
        resting: It takes no work now: its daemon drains or does not answer.
        daemon: Socket path or URL of its daemon.
        daemon_pid: The embedded daemon, or 0.
        daemon_ours: We started that daemon.
        tier: The daemon's isolation tier, or "".
    """

    incarnation: str
    version: int
    slots: int
    resting: bool = False
    daemon: str = ""
    daemon_pid: int = 0
    daemon_ours: bool = False
    tier: str = ""
