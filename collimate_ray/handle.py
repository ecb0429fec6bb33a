"""GraderHandle: what callers hold. Small, picklable, usable from any process of the cluster.

Checks arguments in the caller, sends a spec once and then its hash, finds the grader by name again when it has died.
Must not wait for grades: each ``.remote(...)`` gives a plain ObjectRef. Source: design, API.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import ray

from collimate_ray.errors import ConfigError, GraderClosed
from collimate_ray.messages import OnInfraError, SpecParcel, Submission
from collimate_ray.spec import RewardSpec
from collimate_ray.submission import Seeds, make_submission, spec_of

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...])

#: Specs of up to this size travel with each call, bytes; bigger ones are put into the object store once. Ray keeps
#: arguments of up to 100 KiB together inside a call (measured: beyond it a call costs twice as much).
INLINE_BYTES = 16 << 10
#: Big specs kept in the object store by one handle; the grader has its own copy of those in use.
PARCELS_KEPT = 256
#: A name is looked up again after this time, s (measured: 0.03 ms a look).
RESOLVE_S = 1.0


class RemoteMethod(Generic[P]):
    """A method in Ray's manner: ``method.remote(...)`` gives an ObjectRef.

    Args:
        call: What ``remote`` calls.
    """

    def __init__(self, call: Callable[P, Any]) -> None:
        self._call = call

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Submit the call; returns an ObjectRef."""
        return self._call(*args, **kwargs)


class GraderHandle:
    """A grader, by name.

    Args:
        name: The grader's actor name.
        namespace: Its namespace.

    Every ``.remote`` raises ``GraderClosed`` if there is no such grader (any more), ``ConfigError`` or ``SpecError``
    if its arguments are wrong. Waiting for a ref raises ``GroupFailed`` (with ``.partial``) where a group has no
    result, ``SpecError`` where the spec's own code failed, and Ray's ``ActorDiedError`` if the grader dies meanwhile.
    """

    def __init__(self, name: str = "grader", namespace: str = "collimate") -> None:
        self.name = name
        self.namespace = namespace
        self._actor: Any = None
        self._resolved = 0.0
        #: spec hash -> parcel of a big spec; least recently used first
        self._parcels: OrderedDict[str, SpecParcel] = OrderedDict()

    def __repr__(self) -> str:
        return f"GraderHandle(name={self.name!r}, namespace={self.namespace!r})"

    def __reduce__(self) -> tuple[type[GraderHandle], tuple[str, str]]:
        return type(self), (self.name, self.namespace)

    @property
    def grade(self) -> RemoteMethod[Any]:
        """``grade.remote(completion, spec, *, seed, group_id, index, limits, deadline_s, on_infra_error)``.

        Gives a ref of a ``GradeResult``. See ``design/API.md`` for the arguments.
        """
        return RemoteMethod(self._grade)

    @property
    def grade_group(self) -> RemoteMethod[Any]:
        """``grade_group.remote(completions, spec, *, seeds, base_seed, group_id, limits, deadline_s, on_infra_error)``.

        Gives a ref of a ``GroupResult``, whole and in the order of ``completions``.
        """
        return RemoteMethod(self._grade_group)

    @property
    def grade_groups(self) -> RemoteMethod[[Sequence[Mapping[str, Any]]]]:
        """``grade_groups.remote([{"completions": ..., "spec": ..., ...}])``, keys as the arguments of ``grade_group``.

        Gives a ref of a list of ``GroupResult``, in order. If a group fails its error is raised once all have ended;
        those that came through under a ``group_id`` are answered from memory when they are sent again.
        """
        return RemoteMethod(self._grade_groups)

    @property
    def stats(self) -> RemoteMethod[[]]:
        """``stats.remote()``: a ref of a dict of counters; see ``grader.Grader.stats``."""
        return RemoteMethod(lambda: self.actor().stats.remote())

    @property
    def drain_node(self) -> RemoteMethod[[str]]:
        """``drain_node.remote(node_id)``: no new work for a node; gives a ref of its whole id.

        ``node_id`` may be a prefix, at least 4 characters; waiting raises ``ConfigError`` where it names none or many.
        """
        return RemoteMethod(lambda node_id: self.actor().hold.remote(node_id, True))

    @property
    def undrain_node(self) -> RemoteMethod[[str]]:
        """``undrain_node.remote(node_id)``: ends ``drain_node``."""
        return RemoteMethod(lambda node_id: self.actor().hold.remote(node_id, False))

    @property
    def cancel(self) -> RemoteMethod[[str]]:
        """``cancel.remote(group_id)``: its groups fail with ``GroupFailed``; gives a ref of how many were open."""
        return RemoteMethod(lambda group_id: self.actor().cancel.remote(group_id))

    def actor(self) -> Any:
        """Give the grader's actor, looked up by name again after a second.

        Raises:
            GraderClosed: There is none.
            ConfigError: Ray is not initialised.
        """
        if self._actor is None or time.monotonic() - self._resolved > RESOLVE_S:
            self._actor = find_actor(self.name, self.namespace)
            self._resolved = time.monotonic()
        return self._actor

    def _grade(
        self,
        completion: str,
        spec: RewardSpec | Mapping[str, Any],
        *,
        seed: str | None = None,
        group_id: str | None = None,
        index: int = 0,
        limits: Mapping[str, float] | None = None,
        deadline_s: float = 600.0,
        on_infra_error: OnInfraError = "raise",
    ) -> Any:
        if not isinstance(completion, str):
            raise ConfigError(f"completion: expected a str, found {type(completion).__name__}")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ConfigError(f"index: expected a whole number of at least 0, found {index!r}")
        submission = make_submission(
            [completion],
            self._parcel(spec),
            seeds=[seed],
            group_id=group_id,
            index=index,
            limits=limits,
            deadline_s=deadline_s,
            on_infra_error=on_infra_error,
        )
        return self.actor().grade.remote(submission)

    def _grade_group(self, completions: Sequence[str], spec: RewardSpec | Mapping[str, Any], **options: Any) -> Any:
        return self.actor().grade_group.remote(self._submission(completions, spec, **options))

    def _grade_groups(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        submissions = [self._of_dict(index, group) for index, group in enumerate(groups)]
        return self.actor().grade_groups.remote(submissions)

    def _of_dict(self, index: int, group: Mapping[str, Any]) -> Submission:
        if not isinstance(group, Mapping) or not {"completions", "spec"} <= group.keys():
            found = sorted(map(str, group)) if isinstance(group, Mapping) else type(group).__name__
            raise ConfigError(f"groups[{index}]: expected a dict with completions and spec, found {found}")
        return self._submission(**{str(name): value for name, value in group.items()})

    def _submission(
        self,
        completions: Sequence[str],
        spec: RewardSpec | Mapping[str, Any],
        *,
        seeds: Seeds = None,
        base_seed: str | None = None,
        group_id: str | None = None,
        limits: Mapping[str, float] | None = None,
        deadline_s: float = 600.0,
        on_infra_error: OnInfraError = "raise",
    ) -> Submission:
        return make_submission(
            completions,
            self._parcel(spec),
            seeds=seeds,
            base_seed=base_seed,
            group_id=group_id,
            limits=limits,
            deadline_s=deadline_s,
            on_infra_error=on_infra_error,
        )

    def _parcel(self, spec: RewardSpec | Mapping[str, Any]) -> SpecParcel:
        checked = spec_of(spec)
        spec_hash = checked.spec_hash()
        parcel = self._parcels.get(spec_hash)
        if parcel is None:
            parcel = _pack(spec_hash, checked.to_dict())
            self._parcels[spec_hash] = parcel
        self._parcels.move_to_end(spec_hash)
        if len(self._parcels) > PARCELS_KEPT:
            self._parcels.popitem(last=False)
        return parcel


def find_actor(name: str, namespace: str) -> Any:
    """Find a grader's actor.

    Raises:
        GraderClosed: There is none.
        ConfigError: Ray is not initialised.
    """
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process: call ray.init(...) first")
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        text = f"no grader {name!r} in namespace {namespace!r}: call collimate_ray.start() first"
        raise GraderClosed(text) from error


def _pack(spec_hash: str, data: Mapping[str, Any]) -> SpecParcel:
    if len(json.dumps(data)) <= INLINE_BYTES:
        return SpecParcel(spec_hash, data)
    return SpecParcel(spec_hash, None, (ray.put(data),))
