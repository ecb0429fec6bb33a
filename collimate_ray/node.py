"""NodeGrader: the Ray actor of one node. It grades what it is sent, in its slots, through the node's daemon.

Must not place or retry work: that is the grader's. ``run`` is only an acknowledgement; results go back in batches
by ``grader.report``. This module is one of the boundaries where any error becomes a record. Source: design, Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from collimate_ray import __version__
from collimate_ray.config import read_environment
from collimate_ray.errors import CollimateRayError, ConfigError, SandboxUnavailable
from collimate_ray.homeloop import HomeLoop
from collimate_ray.messages import GraderConfig, JobKey, NodeState, Outcome, Shard, ShardItem
from collimate_ray.node_daemon import NodeDaemon
from collimate_ray.pool import Job, SlotPool
from collimate_ray.spec import RewardSpec, spec_from_dict

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A beat is answered after this time if nothing changes, s: one call a second and node.
BEAT_S = 1.0
#: Without a grader for so long a node releases everything and ends, s (design, Ray).
ORPHAN_S = 60.0
#: Pause between looks at the daemon, s.
TEND_S = 1.0
#: A report that the grader does not take in this time is sent again, s; answers are idempotent.
REPORT_S = 10.0
#: Specs kept; the grader sends one again when it fell out.
SPECS_KEPT = 256
#: Template of specs that name none (spec/).
DEFAULT_TEMPLATE = "python"


def actor_name(config: GraderConfig, node_id: str) -> str:
    """Give the name of a node's actor in the grader's namespace."""
    name = f"node/{node_id}"
    return name if config.name == "grader" else f"{config.name}/{name}"


def create(config: GraderConfig, node_id: str) -> Any:
    """Create a node's actor, or find it; blocks for a call to the cluster.

    Args:
        config: How the grader was started.
        node_id: The node; the actor never lives elsewhere.
    """
    options = {
        "name": actor_name(config, node_id),
        "namespace": config.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    make: Any = ray.remote(concurrency_groups={"ctl": 16, "io": 64})  # type: ignore[call-overload]
    actor_class = make(NodeGrader)
    return actor_class.options(**options).remote(config, node_id)


class NodeGrader:
    """The actor. All state lives on its home loop.

    Args:
        config: How the grader was started.
        node_id: The node that it is on.
    """

    def __init__(self, config: GraderConfig, node_id: str) -> None:
        self._life = NodeLife(config, node_id)
        self._home = self._life.home

    @ray.method(concurrency_group="ctl")
    async def hello(self, version: str, grader: Any, sharers: int) -> NodeState:
        """Begin a life under a grader: forget older work, find or start the daemon.

        Args:
            version: The grader's ``__version__``.
            grader: Where reports go.
            sharers: Raylets on this host.

        Raises:
            ConfigError: Another version is installed here, or the daemon is not what was asked for.
            SandboxUnavailable: The daemon can't be reached or started.
        """
        return await self._home.run(self._life.hello(version, grader, sharers))

    @ray.method(concurrency_group="ctl")
    async def beat(self, seen: int, sharers: int) -> NodeState:
        """Give the state when it is newer than version ``seen``, else after a second; proves both sides alive."""
        return await self._home.run(self._life.beat(seen, sharers))

    @ray.method(concurrency_group="io")
    async def run(self, shard: Shard) -> tuple[str, ...]:
        """Start a shard.

        Returns:
            Hashes of specs that are missing here; their items were not started.

        Raises:
            SandboxUnavailable: The shard is meant for another life of this actor; nothing was started.
        """
        return await self._home.run(self._life.run(shard))

    @ray.method(concurrency_group="ctl")
    async def cancel(self, keys: Sequence[JobKey]) -> None:
        """Stop jobs; their outcomes are not reported."""
        await self._home.run(self._life.cancel(keys))

    @ray.method(concurrency_group="ctl")
    async def shutdown(self, stop_daemon: bool) -> None:
        """Stop all work and release the daemon; the caller then kills the actor.

        Args:
            stop_daemon: End the embedded daemon even if an earlier life of this actor started it.
        """
        await self._home.run(self._life.release(stop_daemon))


class NodeLife:
    """What a NodeGrader does, without Ray's method table. Coroutines run on ``home``.

    Args:
        config: How the grader was started.
        node_id: The node.
    """

    def __init__(self, config: GraderConfig, node_id: str) -> None:
        self.home = HomeLoop("node-home")
        self._config = config
        self._node_id = node_id
        self._wanted_slots = config.slots or read_environment().slots
        self._threads = self._wanted_slots or host_slots()
        owner = f"node-{node_id[:12]}-{uuid.uuid4().hex[:8]}"
        self._daemon = NodeDaemon(config, node_id, self._threads, owner)
        self._side = ThreadPoolExecutor(4, thread_name_prefix="side")
        self._pool: SlotPool | None = None
        self._grader: Any = None
        self._state = NodeState("", 0, 1)
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._heard = time.monotonic()
        #: hash -> spec, or the error that it gave; least recently used first
        self._specs: OrderedDict[str, RewardSpec | Exception] = OrderedDict()
        self._outcomes: list[Outcome] = []
        self._reporting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.home.soon(self._spawn, self._tend())

    async def hello(self, version: str, grader: Any, sharers: int) -> NodeState:
        """See ``NodeGrader.hello``."""
        if version != __version__:
            raise ConfigError(
                f"collimate_ray: expected version {version} (the grader's) on node {self._node_id[:12]}, "
                f"found {__version__}; install the same version on every node"
            )
        async with self._lock:
            self._heard = time.monotonic()
            await self._blocking(self._begin)
            self._grader = grader
            self._outcomes.clear()
            self._update(incarnation=uuid.uuid4().hex, slots=self._slots(sharers), **self._daemon.describe())
        return self._state

    async def beat(self, seen: int, sharers: int) -> NodeState:
        """See ``NodeGrader.beat``."""
        self._heard = time.monotonic()
        self._update(slots=self._slots(sharers))
        if self._state.version <= seen:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), BEAT_S)
        return self._state

    async def run(self, shard: Shard) -> tuple[str, ...]:
        """See ``NodeGrader.run``."""
        pool = self._pool
        if pool is None or shard.incarnation != self._state.incarnation:
            raise SandboxUnavailable("the node's actor was started anew", self._node_id, False)
        for spec_hash, data in shard.specs.items():
            await self._learn(spec_hash, data)
        missing = {terms.spec_hash for terms in shard.terms.values() if terms.spec_hash not in self._specs}
        now = time.monotonic()
        for item in shard.items:
            if shard.terms[item.key[0]].spec_hash not in missing:
                self._start(pool, item, shard, now)
        return tuple(missing)

    async def cancel(self, keys: Sequence[JobKey]) -> None:
        """See ``NodeGrader.cancel``."""
        if self._pool is not None:
            await self._blocking(self._pool.cancel, keys)

    async def release(self, stop_daemon: bool) -> None:
        """See ``NodeGrader.shutdown``."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        async with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                await self._blocking(pool.close)
            # asked only now: a hello that failed may have started a daemon and told nobody
            await self._blocking(self._daemon.close, stop_daemon or self._daemon.ours)

    def _begin(self) -> None:
        """Open the daemon and make sure of an idle pool; blocks."""
        self._daemon.open()
        if self._pool is None:
            can_cancel = "cancel" in self._daemon.features
            self._pool = SlotPool(self._daemon.client, self._threads, can_cancel=can_cancel)
        self._pool.cancel_all()

    def _start(self, pool: SlotPool, item: ShardItem, shard: Shard, now: float) -> None:
        terms = shard.terms[item.key[0]]
        spec = self._specs[terms.spec_hash]
        if isinstance(spec, Exception):
            self._collect(Outcome(item.key, error=spec))
            return
        template = self._config.template if spec.template == DEFAULT_TEMPLATE else spec.template
        deadline = now + terms.deadline_s
        job = Job(item.key, item.completion, spec, item.seed, template, terms.limits, deadline)
        pool.submit(job, lambda outcome: self.home.soon(self._collect, outcome))

    async def _learn(self, spec_hash: str, data: Mapping[str, Any]) -> None:
        spec: RewardSpec | Exception
        try:
            spec = await self._blocking(spec_from_dict, data)
        except CollimateRayError as error:
            spec = error
        self._specs[spec_hash] = spec
        self._specs.move_to_end(spec_hash)
        if len(self._specs) > SPECS_KEPT:
            self._specs.popitem(last=False)

    def _slots(self, sharers: int) -> int:
        return self._wanted_slots or max(1, self._threads // max(1, sharers))

    def _update(self, **changes: Any) -> None:
        """Change the state; a beat that waits answers at once."""
        old = self._state
        fields = {name: getattr(old, name) for name in old.__dataclass_fields__} | changes
        if NodeState(**fields) == old:
            return
        self._state = NodeState(**(fields | {"version": old.version + 1}))
        self._changed.set()
        self._changed = asyncio.Event()

    def _collect(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if not self._reporting:
            self._reporting = True
            self._spawn(self._report())

    async def _report(self) -> None:
        """Send what has finished. What finishes while a call is out goes with the next one: calls grow, not queues."""
        try:
            while self._outcomes:
                batch, self._outcomes = self._outcomes, []
                await self._deliver(self._grader, batch)
        finally:
            self._reporting = False

    async def _deliver(self, grader: Any, batch: list[Outcome]) -> None:
        while grader is self._grader:
            try:
                await asyncio.wait_for(grader.report.remote(self._node_id, batch), REPORT_S)
                return
            except ray.exceptions.ActorDiedError:
                logger.info("node %s: no grader takes %d results", self._node_id, len(batch))
                return
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                name = type(error).__name__
                logger.warning("node %s: report not taken (%s), sent again", self._node_id, name)
                await asyncio.sleep(BEAT_S)

    async def _tend(self) -> None:
        """Look after the daemon for ever, and leave when no grader is heard of."""
        while time.monotonic() - self._heard < ORPHAN_S:
            await asyncio.sleep(TEND_S)
            if self._pool is None:
                continue
            async with self._lock:
                try:
                    resting = await self._blocking(self._daemon.tend)
                except CollimateRayError as error:
                    logger.warning("node %s: daemon: %s", self._node_id, error)
                    resting = True
                self._update(resting=resting, **self._daemon.describe())
        await self._leave()

    async def _leave(self) -> None:
        logger.info("node %s: no grader for %.0f s, leaving", self._node_id, ORPHAN_S)
        await self.release(stop_daemon=False)
        name = actor_name(self._config, self._node_id)
        await self._blocking(lambda: ray.kill(ray.get_actor(name, namespace=self._config.namespace)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._side, call, *args)


def host_slots() -> int:
    """Give the slots of a whole host: half its cores, the rest being the trainer's, x 4."""
    return max(1, 2 * len(os.sched_getaffinity(0)))
