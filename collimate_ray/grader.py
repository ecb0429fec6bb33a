"""The grader: the one Ray actor that schedules all grading of a cluster, and ``start``, ``get``, ``stop``.

Must not grade or place anything itself: core decides, nodes grade. It returns values, never refs that it owns, and
raises errors.py only. Source: design, Ray and API.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from collimate_ray import __version__
from collimate_ray.config import read_environment
from collimate_ray.engine import Engine
from collimate_ray.errors import CollimateRayError, ConfigError, GraderClosed, GroupFailed, SandboxUnavailable
from collimate_ray.fleet import Fleet
from collimate_ray.handle import GraderHandle, find_actor
from collimate_ray.homeloop import HomeLoop
from collimate_ray.messages import GraderConfig, Outcome, SpecParcel, Submission
from collimate_ray.node import DEFAULT_TEMPLATE, actor_name
from collimate_ray.results import GradeResult, GroupResult
from collimate_ray.sandbox.tier import checked_tier
from collimate_ray.submission import positive

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Calls that wait for grades at once; more queue up in Ray. A step of a big run is some 8,000 rollouts.
OPEN_CALLS = 20_000
#: Calls of nodes and operators at once; a group of its own, so that reports never wait behind grades.
CONTROL_CALLS = 1_000
#: Big specs kept by hash.
SPECS_KEPT = 1_000
#: Longest wait for a spec in the object store, s.
SPEC_S = 30.0
#: Longest wait of ``start`` for its first node, s: a daemon and a Ray worker have to start.
START_S = 60.0
#: Longest wait of ``stop`` for an actor's shutdown, s.
STOP_S = 45.0
#: Longest wait for open calls to return their last answer before the actor is killed, s, and looks in that time.
FAREWELL_S, FAREWELL_LOOKS = 2.0, 20
#: Margin of a call over the time that its method takes, s.
CALL_S = 10.0
#: Pause between looks at the clock of ``idle_timeout_s``, s.
IDLE_LOOK_S = 1.0
#: Times that ``start`` makes a new actor when the one it found was dying.
START_TRIES = 3


class Grader:
    """The actor. All state lives on its home loop; methods only go there and back.

    Args:
        config: How it was started.
    """

    def __init__(self, config: GraderConfig) -> None:
        self._config = config
        self._home = HomeLoop("grader-home")
        #: calls for grades, or that wait for a node, which have not returned
        self._calls = 0
        self._fleet = Fleet(config, ray.get_runtime_context().current_actor)
        self._engine = Engine(self._fleet)
        #: hash -> dict of a big spec, least recently used first
        self._specs: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._home.soon(self._begin)

    @ray.method(concurrency_group="io")
    async def grade(self, submission: Submission) -> GradeResult:
        """Grade one rollout."""
        return (await self._counted(self._grade(submission))).results[0]

    @ray.method(concurrency_group="io")
    async def grade_group(self, submission: Submission) -> GroupResult:
        """Grade a group."""
        return await self._counted(self._grade(submission))

    @ray.method(concurrency_group="io")
    async def grade_groups(self, submissions: Sequence[Submission]) -> list[GroupResult]:
        """Grade groups; if one fails its error is raised once all have ended."""
        return await self._counted(self._grade_all(submissions))

    @ray.method(concurrency_group="ctl")
    async def ready(self, timeout_s: float) -> str:
        """Wait until a node is up.

        Returns:
            This grader's version.

        Raises:
            SandboxUnavailable: No node came up in time; the text tells why.
            ConfigError: No node can come up, by the configuration's fault.
        """
        problem = await self._counted(self._fleet.ready(timeout_s))
        self._engine.touch()
        if problem is not None:
            raise SandboxUnavailable(f"no node came up within {timeout_s:.0f} s: {problem}", None, False)
        return __version__

    @ray.method(concurrency_group="ctl")
    async def version(self) -> str:
        """Give this grader's version; proves that it lives."""
        return __version__

    @ray.method(concurrency_group="ctl")
    async def config(self) -> GraderConfig:
        """Give how it was started."""
        return self._config

    @ray.method(concurrency_group="ctl")
    async def report(self, node_id: str, outcomes: Sequence[Outcome]) -> None:
        """Take in a node's answers."""
        self._home.soon(self._engine.absorb, node_id, outcomes)

    @ray.method(concurrency_group="ctl")
    async def stats(self) -> dict[str, Any]:
        """Count what happened since the start.

        Returns:
            See ``GraderHandle.stats``.
        """
        return await self._home.run(self._stats())

    @ray.method(concurrency_group="ctl")
    async def hold(self, node_id: str, held: bool) -> str:
        """Drain a node for an operator (True) or end that (False); gives its whole id."""
        return await self._home.run(_soon(self._fleet.hold, node_id, held))

    @ray.method(concurrency_group="ctl")
    async def cancel(self, group_id: str) -> int:
        """Cancel the open groups of a name; gives how many there were."""
        return await self._home.run(_soon(self._engine.cancel, group_id))

    @ray.method(concurrency_group="ctl")
    async def shutdown(self) -> None:
        """End all groups, node actors and the daemons that they started; the caller then kills this actor."""
        await self._home.run(self._close())

    def _begin(self) -> None:
        self._fleet.start(self._engine)
        self._idle = asyncio.get_running_loop().create_task(self._end_when_idle())

    async def _counted(self, work: Coroutine[Any, Any, T]) -> T:
        self._calls += 1
        try:
            return await self._home.run(work)
        finally:
            self._calls -= 1

    async def _grade(self, submission: Submission) -> GroupResult:
        return await self._engine.grade(submission, await self._unpack(submission.spec))

    async def _grade_all(self, submissions: Sequence[Submission]) -> list[GroupResult]:
        answers = await asyncio.gather(*map(self._grade, submissions), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, GroupResult)]

    async def _unpack(self, parcel: SpecParcel) -> Mapping[str, Any]:
        if parcel.data is not None:
            return parcel.data
        data = self._specs.get(parcel.spec_hash)
        if data is None:
            data = await _fetch(parcel)
            self._specs[parcel.spec_hash] = data
        self._specs.move_to_end(parcel.spec_hash)
        if len(self._specs) > SPECS_KEPT:
            self._specs.popitem(last=False)
        return data

    async def _stats(self) -> dict[str, Any]:
        self._engine.touch()
        stats = self._engine.stats()
        done, running = stats.pop("done"), stats.pop("running")
        nodes = self._fleet.describe()
        for node_id, node in nodes.items():
            node.update(done=done.get(node_id, 0), running=running.get(node_id, 0))
        return stats | {"nodes": nodes, "version": __version__}

    async def _close(self) -> None:
        if self._engine.closed:
            return
        self._engine.close()
        await self._fleet.close()
        for _ in range(FAREWELL_LOOKS):
            if not self._calls:
                break
            await asyncio.sleep(FAREWELL_S / FAREWELL_LOOKS)
        await asyncio.sleep(FAREWELL_S / FAREWELL_LOOKS)  # Ray sends the answers after the calls have returned

    async def _end_when_idle(self) -> None:
        while self._calls or time.monotonic() - self._engine.touched < self._config.idle_timeout_s:
            await asyncio.sleep(IDLE_LOOK_S)
        logger.info("idle for %.0f s, ending", self._config.idle_timeout_s)
        await self._close()
        me = await asyncio.to_thread(find_actor, self._config.name, self._config.namespace)
        await asyncio.to_thread(ray.kill, me)


async def _soon(call: Any, *args: Any) -> Any:
    return call(*args)


async def _fetch(parcel: SpecParcel) -> Mapping[str, Any]:
    try:
        data: Mapping[str, Any] = await asyncio.wait_for(parcel.ref[0], SPEC_S)
        return data
    except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
        raise GroupFailed(f"the spec did not arrive: {type(error).__name__}", None, False) from error


def start(
    *,
    name: str = "grader",
    namespace: str = "collimate",
    daemon: str = "auto",
    template: str = DEFAULT_TEMPLATE,
    slots: int | None = None,
    memory_mib: int | None = None,
    node_label: str | None = None,
    require_tier: str | None = None,
    schedulers: int = 1,
    idle_timeout_s: float = 3600.0,
) -> GraderHandle:
    """Start the cluster's grader, or find the one that is there; its first ``start`` decided how it is.

    A later ``start`` that asks for something else gets the running grader, and a warning in the log.

    Args:
        name: The grader's actor name.
        namespace: Namespace of all its actors.
        daemon: ``auto`` (``connect()``'s order on each node), ``embedded``, a socket path or a URL.
        template: Template for specs that name none; ``$COLLIMATE_TEMPLATE`` stands in for the default.
        slots: Candidates that a node grades at once; ``$COLLIMATE_SLOTS``, else half the host's cores x 4, shared by
            its raylets.
        memory_mib: Bound of the embedded daemon's session limits together, MiB.
        node_label: ``key`` or ``key=value`` that a node must carry to grade; None: all nodes grade.
        require_tier: Isolation tier that each node's daemon must have; ``$COLLIMATE_REQUIRE_TIER``.
        schedulers: Scheduler actors; 1.
        idle_timeout_s: The grader ends itself after so long without a call, s.

    Returns:
        A handle, once at least one node is ready to grade.

    Raises:
        ConfigError: Ray is not initialised, an argument is wrong, or no node can be as it was asked for.
        SandboxUnavailable: No node came up within 60 s; the text says why.
    """
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process: call ray.init(...) before start()")
    if schedulers != 1:
        raise ConfigError(f"schedulers: expected 1, found {schedulers!r}")
    config = _config(
        template,
        slots,
        require_tier,
        name=name,
        namespace=namespace,
        daemon=daemon,
        memory_mib=memory_mib,
        node_label=node_label,
        idle_timeout_s=idle_timeout_s,
    )
    version, running = _ready(config)
    _same_version(version)
    _warn_of_differences(config, running)
    return GraderHandle(name, namespace)


def get(name: str = "grader", *, namespace: str = "collimate", timeout_s: float = 10.0) -> GraderHandle:
    """Find the cluster's grader from any process of it.

    Args:
        name: The grader's actor name.
        namespace: Its namespace.
        timeout_s: Longest wait for its first answer, s, above 0.

    Raises:
        ConfigError: Ray is not initialised, an argument is wrong, or the grader runs another version of this package.
        GraderClosed: There is none, or it does not answer in time.
    """
    positive("timeout_s", timeout_s)
    handle = GraderHandle(name, namespace)
    try:
        version = ray.get(handle.actor().version.remote(), timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise GraderClosed(f"the grader {name!r} does not answer: {type(error).__name__}") from error
    _same_version(version)
    return handle


def stop(handle_or_name: GraderHandle | str = "grader") -> None:
    """End a grader, its node actors and the daemons that they started; nothing happens if there is none.

    Args:
        handle_or_name: A handle, or a name in the namespace ``collimate``.

    Raises:
        ConfigError: Ray is not initialised, or it is neither a handle nor a name.
    """
    if not isinstance(handle_or_name, (GraderHandle, str)):
        raise ConfigError(f"handle_or_name: expected a GraderHandle or a name, found {handle_or_name!r}")
    handle = handle_or_name if isinstance(handle_or_name, GraderHandle) else GraderHandle(handle_or_name)
    try:
        actor = find_actor(handle.name, handle.namespace)
    except GraderClosed:
        actor = None
    if actor is not None:
        _end(actor, actor.shutdown.remote())
    config = GraderConfig(name=handle.name, namespace=handle.namespace)
    for orphan in _named_actors(actor_name(config, ""), handle.namespace):
        _end(orphan, orphan.shutdown.remote(False))


def _config(template: str, slots: int | None, require_tier: str | None, **rest: Any) -> GraderConfig:
    env = read_environment()
    config = GraderConfig(
        template=env.template or template if template == DEFAULT_TEMPLATE else template,
        slots=slots if slots is not None else env.slots,
        require_tier=checked_tier(require_tier or env.require_tier),
        **rest,
    )
    for field in ("name", "namespace", "daemon", "template"):
        value = getattr(config, field)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{field}: expected a str that is not empty, found {value!r}")
    for field in ("slots", "memory_mib"):
        value = getattr(config, field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{field}: expected a whole number of at least 1, found {value!r}")
    if not isinstance(config.idle_timeout_s, (int, float)) or not config.idle_timeout_s > 0:
        raise ConfigError(f"idle_timeout_s: expected a number above 0, found {config.idle_timeout_s!r}")
    return config


def _create(config: GraderConfig, soft: bool) -> Any:
    """Create the grader's actor on this driver's node, or find the one that exists.

    Soft affinity alone won't do: Ray 2.60 puts an actor of no CPUs on any node in spite of it (measured, 3 of 3).
    """
    here = ray.get_runtime_context().get_node_id()
    groups = {"ctl": CONTROL_CALLS, "io": OPEN_CALLS}
    actor_class = ray.remote(concurrency_groups=groups)(Grader)  # type: ignore[call-overload]
    options = {
        "name": config.name,
        "namespace": config.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=soft),
    }
    return actor_class.options(**options).remote(config)


def _ready(config: GraderConfig) -> tuple[str, GraderConfig]:
    """Create or find the grader, wait until it can grade; a dying one that was found is replaced.

    Returns:
        Its version, and how it was started.
    """
    died = ""
    for number in range(START_TRIES):
        actor = _create(config, soft=number > 0)  # not here where Ray drains this node
        try:
            version, running = ray.get([actor.ready.remote(START_S), actor.config.remote()], timeout=START_S + CALL_S)
            return version, running
        except ray.exceptions.RayTaskError as error:
            _end(actor, actor.shutdown.remote())
            raise _own(error) from None
        except ray.exceptions.RayError as error:
            died = str(error).strip().rpartition("\n")[2]
            logger.warning("grader %r: %s, made anew", config.name, type(error).__name__)
    raise GraderClosed(f"the grader {config.name!r} can't be started: it died {START_TRIES} times: {died}")


def _warn_of_differences(asked: GraderConfig, running: GraderConfig) -> None:
    """Say which settings were asked for in vain. One that has its default was not asked for."""
    different = [
        f"{field.name} (asked for {getattr(asked, field.name)!r}, it has {getattr(running, field.name)!r})"
        for field in dataclasses.fields(GraderConfig)
        if getattr(asked, field.name) not in (field.default, getattr(running, field.name))
    ]
    if different:
        logger.warning("start: the grader %r runs with other settings: %s", asked.name, ", ".join(different))


def _same_version(version: str) -> None:
    if version != __version__:
        raise ConfigError(
            f"collimate_ray: expected version {version} (the grader's), found {__version__}; install the same "
            "version on every node"
        )


def _own(error: ray.exceptions.RayTaskError) -> Exception:
    """Give the error of ours that an actor raised, without Ray's remote traceback."""
    return error.cause if isinstance(error.cause, CollimateRayError) else error


def _named_actors(prefix: str, namespace: str) -> list[Any]:
    found = []
    for row in ray.util.list_named_actors(all_namespaces=True):
        if row["namespace"] == namespace and row["name"].startswith(prefix):
            with contextlib.suppress(ValueError):
                found.append(ray.get_actor(row["name"], namespace=namespace))
    return found


def _end(actor: Any, shutdown: Any) -> None:
    """Wait for an actor's own shutdown, then kill it."""
    try:
        ray.get(shutdown, timeout=STOP_S)
    except ray.exceptions.RayError as error:
        logger.info("an actor ended before its shutdown did: %s", type(error).__name__)
    ray.kill(actor)
