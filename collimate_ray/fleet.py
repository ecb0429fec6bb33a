"""The node actors of a grader: made for each node, listened to, told to work, given up. All on the grader's home loop.

Must not decide placement (core) or touch groups (engine). Each node has one task that keeps a call (``beat``) open
to its actor, so that the actor's death is noticed when that call fails, 1 to 2 s after a raylet is killed, and not
when Ray declares the node dead (14 to 65 s). This module is one of the boundaries where Ray's errors are classified.
Source: design, Ray; notes RAY.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import ray

from collimate_ray import __version__
from collimate_ray.cluster import ClusterNode, living_nodes
from collimate_ray.core import Event, NodeDraining, NodeLost, NodeReport, NodeUndrained, NodeUp
from collimate_ray.errors import ConfigError, InfraError, SandboxUnavailable
from collimate_ray.messages import GraderConfig, JobKey, NodeState, Outcome, Shard, ShardItem, Terms
from collimate_ray.node import create

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Pause between looks at the cluster, s (measured: 0.6 ms a look).
RECONCILE_S = 0.5
#: A beat that takes longer is a miss, s; an answer comes after 1 s at the latest.
BEAT_DEADLINE_S = 5.0
#: Misses in a row after which a silent node counts as lost; late answers of it are dropped, so this is safe.
MISSES = 3
#: Deadline of ``hello``: it may start a daemon, which may take 15 s.
HELLO_S = 30.0
#: Deadline of the acknowledgement of a shard, s.
RUN_S = 15.0
#: Deadline of a call to the cluster's head, s.
CLUSTER_S = 10.0
#: Pause before a node that failed is tried again, s.
RETRY_S = 1.0
#: Deadline of a node's shutdown, s: its daemon may finish an exec for 20 s before it kills it.
SHUTDOWN_S = 35.0
#: The same of a node that does not answer, s: a call to an actor that is being restarted elsewhere hangs.
DEAD_S = 3.0


class Listener(Protocol):
    """Who is told what happens to nodes."""

    def feed(self, *events: Event) -> None:
        """Take in events."""

    def absorb(self, node_id: str, outcomes: Sequence[Outcome]) -> None:
        """Take in answers."""

    def running(self, node_id: str) -> int:
        """Give how many candidates run on a node."""


@dataclass(eq=False)
class Member:
    """One living node."""

    node: ClusterNode
    actor: Any = None
    state: NodeState | None = None
    #: the actor answers and the scheduler knows the node
    up: bool = False
    #: an operator drains it
    held: bool = False
    #: what is in the scheduler's mind
    draining: bool = False
    #: it was released because Ray drains it and nothing runs there any more
    released: bool = False
    #: why it is not up, and whether that is the configuration's fault
    problem: str = "starting"
    fatal: bool = False
    #: hashes of the specs that this life of the actor was sent
    specs: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    #: daemon pids that this grader's actors started here
    daemons: set[int] = field(default_factory=set)


class Fleet:
    """All node actors of a grader. It is the engine's ``Carrier``.

    Args:
        config: How the grader was started.
        grader: Handle of the grader's actor, where reports go.
    """

    def __init__(self, config: GraderConfig, grader: Any) -> None:
        self._config = config
        self._grader = grader
        self._listener: Listener | None = None
        self._side = ThreadPoolExecutor(8, thread_name_prefix="cluster")
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        #: node id -> member, one for each living node that has the label
        self.members: dict[str, Member] = {}

    @property
    def listener(self) -> Listener:
        """Who is told; set by ``start``."""
        if self._listener is None:
            raise ConfigError("the fleet was not started")
        return self._listener

    def start(self, listener: Listener) -> None:
        """Begin to look after the nodes; on the home loop."""
        self._listener = listener
        self._spawn(self._reconcile_for_ever())

    async def ready(self, timeout_s: float) -> str | None:
        """Wait until a node is up.

        Args:
            timeout_s: Longest wait, s.

        Returns:
            None, or why no node is up.

        Raises:
            ConfigError: No node can come up, by the configuration's fault.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not any(member.up for member in self.members.values()):
            if self.members and all(member.fatal for member in self.members.values()):
                raise ConfigError(next(iter(self.members.values())).problem)
            if asyncio.get_running_loop().time() > deadline:
                return self._problems()
            await asyncio.sleep(0.02)
        return None

    def send(
        self,
        node_id: str,
        items: tuple[ShardItem, ...],
        terms: Mapping[str, Terms],
        specs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """See ``engine.Carrier``."""
        self._spawn(self._send(self.members[node_id], items, terms, specs))

    def cancel(self, node_id: str, keys: tuple[JobKey, ...]) -> None:
        """See ``engine.Carrier``."""
        member = self.members.get(node_id)
        if member is not None and member.up:
            member.actor.cancel.remote(keys)

    def hold(self, node_id: str, held: bool) -> str:
        """Drain a node, or end that, for an operator.

        Args:
            node_id: The id, or a prefix of at least 4 characters that only one node has.
            held: True to drain.

        Returns:
            The whole id.

        Raises:
            ConfigError: No node, or more than one, is meant.
        """
        found = [known for known in self.members if known == node_id or known.startswith(node_id)]
        if len(found) != 1 or len(node_id) < 4:
            known = ", ".join(name[:12] for name in self.members) or "none"
            raise ConfigError(
                f"node_id: expected an id, or a prefix (4 characters or more) of one of {known}; found {node_id!r}"
            )
        self.members[found[0]].held = held
        self._sync(self.members[found[0]])
        return found[0]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Give what ``stats`` says of each node."""
        return {node_id: self._describe(member) for node_id, member in self.members.items()}

    async def close(self) -> None:
        """End all node actors and the daemons that they started."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._dismiss(member, member.up or member.fatal) for member in self.members.values()))
        self.members.clear()

    async def _reconcile_for_ever(self) -> None:
        while True:
            try:
                await self._reconcile()
            except Exception as error:  # noqa: BLE001 - boundary: whatever Ray raises, the next look may succeed
                logger.warning("the cluster can't be read: %s: %s", type(error).__name__, error)
            await asyncio.sleep(RECONCILE_S)

    async def _reconcile(self) -> None:
        nodes = await asyncio.wait_for(self._blocking(living_nodes, self._config.node_label), CLUSTER_S)
        for node_id in self.members.keys() - nodes.keys():
            self._remove(self.members.pop(node_id))
        for node_id, node in nodes.items():
            member = self.members.get(node_id)
            if member is None and not node.draining:
                self._add(node)
            elif member is not None:
                member.node = node
                self._sync(member)

    def _add(self, node: ClusterNode) -> None:
        member = self.members[node.node_id] = Member(node)
        member.task = self._spawn(self._tend(member))

    def _remove(self, member: Member) -> None:
        logger.warning("node %s is gone", member.node.node_id)
        self._end_task(member)
        self._lost(member, "the node died")
        if member.actor is not None:
            self._spawn(self._kill(member.actor))

    def _sync(self, member: Member) -> None:
        """Tell the scheduler whether a node takes work; let it go when Ray drains it and nothing runs there."""
        if not member.up or member.state is None:
            return
        draining = member.held or member.node.draining or member.state.resting
        if draining != member.draining:
            logger.info("node %s: %s", member.node.node_id, "draining" if draining else "takes work again")
        member.draining = draining
        # Said again each time: the scheduler also drains a node by itself when its daemon refuses work.
        event = NodeDraining if draining else NodeUndrained
        self.listener.feed(event(member.node.node_id))
        if member.node.draining and not self.listener.running(member.node.node_id):
            self._release(member)

    def _release(self, member: Member) -> None:
        """A raylet that drains ends when its last actor has gone: not before our work there is done."""
        self._end_task(member)
        self._lost(member, "released: Ray drains the node")
        member.released = True
        self._spawn(self._dismiss(member, True))

    def _end_task(self, member: Member) -> None:
        if member.task is not None:
            member.task.cancel()
            member.task = None

    async def _tend(self, member: Member) -> None:
        """Keep one node's actor alive and listened to, for as long as the node lives."""
        while True:
            try:
                await self._live(member)
            except Exception as error:  # noqa: BLE001 - boundary: what an actor raises becomes the node's problem
                self._lost(member, _words(error))
                member.fatal = isinstance(error, ConfigError)
            await asyncio.sleep(RETRY_S)

    async def _live(self, member: Member) -> None:
        """One life of a node's actor: from its hello until it fails."""
        node_id = member.node.node_id
        actor = await asyncio.wait_for(self._blocking(create, self._config, node_id), CLUSTER_S)
        member.actor = actor
        hello = actor.hello.remote(__version__, self._grader, member.node.sharers)
        self._note(member, await asyncio.wait_for(hello, HELLO_S))
        member.specs.clear()
        member.up, member.fatal, member.problem, member.draining = True, False, "", False
        logger.info("node %s is up with %d slots", node_id, self._state(member).slots)
        self.listener.feed(NodeUp(node_id, self._state(member).slots))
        self._sync(member)
        while True:
            self._heard(member, await self._beat(member))

    async def _beat(self, member: Member) -> NodeState:
        misses = 0
        while True:
            ref = member.actor.beat.remote(self._state(member).version, member.node.sharers)
            try:
                state: NodeState = await asyncio.wait_for(ref, BEAT_DEADLINE_S)
                return state
            except asyncio.TimeoutError:
                misses += 1
                logger.warning("node %s: no beat for %.0f s", member.node.node_id, misses * BEAT_DEADLINE_S)
                if misses == MISSES:
                    raise

    def _heard(self, member: Member, state: NodeState) -> None:
        old = self._state(member)
        if state.incarnation != old.incarnation:
            raise SandboxUnavailable("the actor was started anew", member.node.node_id)
        if state == old:
            return
        self._note(member, state)
        if state.slots != old.slots:
            self.listener.feed(NodeReport(member.node.node_id, state.slots))
        self._sync(member)

    def _note(self, member: Member, state: NodeState) -> None:
        member.state = state
        if state.daemon_ours:
            member.daemons.add(state.daemon_pid)

    def _lost(self, member: Member, why: str) -> None:
        member.problem = why
        if not member.up:
            return
        member.up = False
        logger.warning("node %s is lost: %s", member.node.node_id, why)
        self.listener.feed(NodeLost(member.node.node_id))

    async def _send(
        self,
        member: Member,
        items: tuple[ShardItem, ...],
        terms: Mapping[str, Terms],
        specs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        unknown = {name: data for name, data in specs.items() if name not in member.specs}
        try:
            shard = Shard(self._state(member).incarnation, items, terms, unknown)
            missing = await self._run(member, shard)
            if missing:
                again = tuple(item for item in items if terms[item.key[0]].spec_hash in missing)
                await self._run(member, replace(shard, items=again, specs={name: specs[name] for name in missing}))
            member.specs.update(specs)
        except Exception as error:  # noqa: BLE001 - boundary: a shard that was not taken is work for another node
            text = f"the node did not take its shard: {_words(error)}"
            lost = SandboxUnavailable(text, member.node.node_id)
            self.listener.absorb(member.node.node_id, [Outcome(item.key, error=lost) for item in items])

    async def _run(self, member: Member, shard: Shard) -> Sequence[str]:
        missing: Sequence[str] = await asyncio.wait_for(member.actor.run.remote(shard), RUN_S)
        return missing

    async def _dismiss(self, member: Member, answers: bool) -> None:
        """End an actor, and its daemon if this grader's actors started it; ``answers``: as far as we know."""
        if member.actor is None:
            return
        patience_s = SHUTDOWN_S if answers else DEAD_S
        ours = member.state is not None and member.state.daemon_pid in member.daemons
        try:
            await asyncio.wait_for(member.actor.shutdown.remote(ours), patience_s)
        except Exception as error:  # noqa: BLE001 - boundary: it is killed next, whatever it said
            logger.warning("node %s: shutdown: %s", member.node.node_id, _words(error))
        await self._kill(member.actor)

    async def _kill(self, actor: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError, asyncio.TimeoutError):
            await asyncio.wait_for(self._blocking(ray.kill, actor), CLUSTER_S)

    def _describe(self, member: Member) -> dict[str, Any]:
        state = member.state
        status = "up" if member.up and not member.draining else "draining" if member.up else "down"
        return {
            "state": "released" if member.released else status,
            "problem": member.problem,
            "slots": state.slots if state else 0,
            "host": member.node.host,
            "daemon": state.daemon if state else "",
            "daemon_pid": state.daemon_pid if state else 0,
            "tier": state.tier if state else "",
        }

    def _problems(self) -> str:
        if not self.members:
            label = self._config.node_label
            return f"no living node carries the label {label!r}" if label else "the cluster has no living node"
        return "; ".join(f"node {name[:12]}: {member.problem}" for name, member in self.members.items())

    def _state(self, member: Member) -> NodeState:
        if member.state is None:
            raise SandboxUnavailable("the node's actor has not said hello", member.node.node_id, False)
        return member.state

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._side, call, *args)


def _words(error: BaseException) -> str:
    """Say what went wrong in one line, without Ray's remote traceback."""
    cause = getattr(error, "cause", None)
    found = cause if isinstance(error, ray.exceptions.RayTaskError) and cause is not None else error
    text = str(found).strip().split("\n")[0]
    name = type(found).__name__
    if isinstance(found, (InfraError, ConfigError)):
        return text
    return f"{name}: {text}" if text else name
