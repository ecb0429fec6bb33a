"""GraderHandle: what callers hold. Small, picklable, usable from any process of the cluster.

Checks arguments in the caller, sends a spec once and then its hash, finds the grader by name again when it has died.
Must not wait for grades: each ``.remote(...)`` gives a plain ObjectRef. Source: design, API.
"""

from __future__ import annotations

import inspect
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray import ObjectRef

from collimate_ray.errors import ConfigError, GraderClosed
from collimate_ray.messages import OnInfraError, SpecParcel, Submission
from collimate_ray.results import GradeResult, GroupResult
from collimate_ray.spec import RewardSpec, as_spec
from collimate_ray.submission import Seeds, make_single, make_submission, name_of, options_of

P = ParamSpec("P")
T = TypeVar("T")

#: Specs of up to this size travel with each call, bytes; bigger ones are put into the object store once. Ray keeps
#: arguments of up to 100 KiB together inside a call (measured: beyond it a call costs twice as much).
INLINE_BYTES = 16 << 10
#: Big specs kept in the object store by one handle; the grader has its own copy of those in use.
PARCELS_KEPT = 256
#: A name is looked up again after this time, s (measured: 0.03 ms a look).
RESOLVE_S = 1.0


class RemoteMethod(Generic[P, T]):
    """A method in Ray's manner: ``method.remote(...)`` gives an ObjectRef.

    Args:
        call: The handle's method that ``remote`` calls; its documentation is shown as this one's.
    """

    def __init__(self, call: Callable[P, ObjectRef[T]]) -> None:
        self._call = call
        self.__doc__ = call.__doc__

    def __repr__(self) -> str:
        return f"{self._call.__qualname__}.remote{inspect.signature(self._call)}"

    def __reduce__(self) -> tuple[Any, ...]:
        bound: Any = self._call
        return getattr, (bound.__self__, bound.__name__)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[T]:
        """Submit the call. Wrong arguments raise at once, everything else when the ref is waited for."""
        return self._call(*args, **kwargs)


class _Remote(Generic[P, T]):
    """Makes a method of a handle a ``RemoteMethod``, whose types are the method's."""

    def __init__(self, function: Callable[Concatenate[GraderHandle, P], ObjectRef[T]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, handle: None, owner: type[GraderHandle]) -> _Remote[P, T]: ...

    @overload
    def __get__(self, handle: GraderHandle, owner: type[GraderHandle]) -> RemoteMethod[P, T]: ...

    def __get__(self, handle: GraderHandle | None, owner: type[GraderHandle]) -> _Remote[P, T] | RemoteMethod[P, T]:
        if handle is None:
            return self
        bound: Callable[P, ObjectRef[T]] = self._function.__get__(handle, owner)
        return RemoteMethod(bound)


class GraderHandle:
    """A grader, by name.

    Args:
        name: The grader's actor name.
        namespace: Its namespace.

    Its methods are called in Ray's manner: ``ref = handle.grade_group.remote(...)``, then ``ray.get(ref)`` or
    ``await ref``. Every ``.remote`` raises ``GraderClosed`` if there is no such grader (any more), ``ConfigError`` or
    ``SpecError`` if its arguments are wrong. Waiting for a ref raises ``GroupFailed`` (with ``.partial``) where a
    group has no result, ``SpecError`` where the spec's own code failed, and Ray's ``ActorDiedError`` if the grader
    dies meanwhile.

    Raises:
        ConfigError: A name is not a str, or is empty.
    """

    def __init__(self, name: str = "grader", namespace: str = "collimate") -> None:
        self.name = name_of("name", name)
        self.namespace = name_of("namespace", namespace)
        self._actor: Any = None
        self._resolved = 0.0
        #: spec hash -> parcel of a big spec; least recently used first
        self._parcels: OrderedDict[str, SpecParcel] = OrderedDict()

    def __repr__(self) -> str:
        return f"GraderHandle(name={self.name!r}, namespace={self.namespace!r})"

    def __reduce__(self) -> tuple[type[GraderHandle], tuple[str, str]]:
        return type(self), (self.name, self.namespace)

    @_Remote
    def grade(
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
    ) -> ObjectRef[GradeResult]:
        """Grade one rollout: ``grade.remote(completion, spec, ...)``.

        Args:
            completion: Model text; its code is found as ``extract_code`` finds it.
            spec: What to run and how to judge it: a ``RewardSpec`` or its JSON form, a dict with ``kind``.
            seed: 64 hex characters, or None: a fresh one.
            group_id: With ``index`` the name of the request: the same work (completion, spec, seed, limits) again
                under the same name joins the request while it is open, and gets the same answer when it has ended
                with a verdict. None: always new.
            index: Place of the rollout in its group, at least 0.
            limits: Limits over those of the spec, each above 0: ``time_s``, ``wall_time_s``, ``total_time_s``,
                ``memory_mib``, ``output_mib``, ``processes``, ``files``, ``file_mib``.
            deadline_s: Longest time until the answer, s, above 0; time in the queue counts.
            on_infra_error: Where no verdict can be had: ``"raise"`` ``GroupFailed``, or ``"mask"``: a result with
                ``valid`` False and ``reward`` None.

        Returns:
            A ref of a ``GradeResult``.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: An argument is wrong, or Ray is not initialised.
            SpecError: The spec or a limit is wrong.
        """
        submission = make_single(
            completion,
            self._parcel(spec),
            seed=seed,
            group_id=group_id,
            index=index,
            limits=limits,
            deadline_s=deadline_s,
            on_infra_error=on_infra_error,
        )
        ref: ObjectRef[GradeResult] = self.actor().grade.remote(submission)
        return ref

    @_Remote
    def grade_group(
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
    ) -> ObjectRef[GroupResult]:
        """Grade a group of rollouts: ``grade_group.remote(completions, spec, ...)``.

        Args:
            completions: Shape (G,), model text; the code of each is found as ``extract_code`` finds it.
            spec: What to run and how to judge it: a ``RewardSpec`` or its JSON form, a dict with ``kind``.
            seeds: How the members' seeds relate. None or ``"vanilla"``: a fresh seed for each. ``"crn"``: one for
                all, which is ``base_seed``, else derived from ``group_id`` by ``seed_from_key``, else fresh.
                ``"deterministic"``: one for all, which is ``base_seed``, else ``DET_SEED``. A list, shape (G,): one
                for each, of 64 hex characters, or None for a fresh one.
            base_seed: 64 hex characters; only with ``"crn"`` and ``"deterministic"``.
            group_id: Name of the group: the same work (completions, spec, seeds, limits) again under the same name
                joins the group while it is open, and gets the same answer when it has ended with all members valid;
                the grader remembers the last 1,000 groups. None: always new.
            limits: Limits over those of the spec, each above 0: ``time_s``, ``wall_time_s``, ``total_time_s``,
                ``memory_mib``, ``output_mib``, ``processes``, ``files``, ``file_mib``.
            deadline_s: Longest time until the whole group's answer, s, above 0; time in the queue counts.
            on_infra_error: Where a member can have no verdict: ``"raise"`` ``GroupFailed`` with ``.partial``, or
                ``"mask"``: that member comes with ``valid`` False and a reward of 0.0.

        Returns:
            A ref of a ``GroupResult``, whole and in the order of ``completions``.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: An argument is wrong, or Ray is not initialised.
            SpecError: The spec or a limit is wrong.
        """
        submission = make_submission(
            completions,
            self._parcel(spec),
            seeds=seeds,
            base_seed=base_seed,
            group_id=group_id,
            limits=limits,
            deadline_s=deadline_s,
            on_infra_error=on_infra_error,
        )
        ref: ObjectRef[GroupResult] = self.actor().grade_group.remote(submission)
        return ref

    @_Remote
    def grade_groups(self, groups: Sequence[Mapping[str, Any]]) -> ObjectRef[list[GroupResult]]:
        """Grade several groups in one call: ``grade_groups.remote([{"completions": ..., "spec": ..., ...}])``.

        Args:
            groups: The arguments of ``grade_group``, by name: ``completions`` and ``spec``, and any of the others.

        Returns:
            A ref of a list of ``GroupResult``, in order. If a group fails its error is raised once all have ended;
            those that came through under a ``group_id`` are answered from memory when they are sent again.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: An argument is wrong or its name unknown, or Ray is not initialised.
            SpecError: A spec or a limit is wrong.
        """
        submissions = [self._of_dict(index, group) for index, group in enumerate(groups)]
        ref: ObjectRef[list[GroupResult]] = self.actor().grade_groups.remote(submissions)
        return ref

    @_Remote
    def stats(self) -> ObjectRef[dict[str, Any]]:
        """Tell what the grader has done since its start: ``stats.remote()``.

        Returns:
            A ref of a dict: ``grades``; ``verdicts``, counts by name; ``infra_errors``, tries without a verdict by
            class of error; ``spec_errors``, candidates whose spec was at fault, by class of error; ``reroutes``,
            tries after a first one; ``groups`` and ``groups_failed``; ``open_groups``; ``queued`` candidates;
            ``grade_ms``, ``p50`` and ``p99`` of the time from dispatch to answer, ms, or None; ``version``; and
            ``nodes``, by id: ``state`` (``up``, ``draining``, ``down``, ``released``), ``problem``, ``slots``,
            ``running``, ``done``, ``host``, ``daemon``, ``daemon_pid``, ``tier``.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: Ray is not initialised.
        """
        ref: ObjectRef[dict[str, Any]] = self.actor().stats.remote()
        return ref

    @_Remote
    def drain_node(self, node_id: str) -> ObjectRef[str]:
        """Give a node no new work; what runs there ends: ``drain_node.remote(node_id)``.

        Args:
            node_id: Ray's node id, or a prefix of it, at least 4 characters. Waiting for the ref raises
                ``ConfigError`` where it names none or many.

        Returns:
            A ref of the whole id.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: Ray is not initialised, or the id is not a str.
        """
        ref: ObjectRef[str] = self.actor().hold.remote(name_of("node_id", node_id), True)
        return ref

    @_Remote
    def undrain_node(self, node_id: str) -> ObjectRef[str]:
        """End ``drain_node``: ``undrain_node.remote(node_id)``.

        Args:
            node_id: As for ``drain_node``.

        Returns:
            A ref of the whole id.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: Ray is not initialised, or the id is not a str.
        """
        ref: ObjectRef[str] = self.actor().hold.remote(name_of("node_id", node_id), False)
        return ref

    @_Remote
    def cancel(self, group_id: str) -> ObjectRef[int]:
        """Cancel the open groups of a name; who waits for them gets ``GroupFailed``: ``cancel.remote(group_id)``.

        Args:
            group_id: The name under which they were sent.

        Returns:
            A ref of how many were open.

        Raises:
            GraderClosed: There is no such grader.
            ConfigError: Ray is not initialised, or the name is not a str.
        """
        ref: ObjectRef[int] = self.actor().cancel.remote(name_of("group_id", group_id))
        return ref

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

    def _of_dict(self, index: int, group: Mapping[str, Any]) -> Submission:
        options = options_of(f"groups[{index}]", group)
        return make_submission(options.pop("completions"), self._parcel(options.pop("spec")), **options)

    def _parcel(self, spec: RewardSpec | Mapping[str, Any]) -> SpecParcel:
        checked = as_spec(spec)
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
