"""The invariants of the scheduler's state. Must not change anything; for tests and for hunting a fault.

Source: design, Core. That each group ends exactly once shows in the commands, not in the state: tests count there.
"""

from __future__ import annotations

from collections.abc import Iterator

from collimate_ray.core.groups import Groups
from collimate_ray.core.nodes import Node, NodeTable, Pace
from collimate_ray.core.placement import may_run
from collimate_ray.core.state import GroupRecord, IndexRecord, IndexState, Lane
from collimate_ray.core.timers import TimerKind, Timers


class InvariantViolated(AssertionError):
    """The scheduler's state contradicts itself: a fault of ours."""


def check(groups: Groups, nodes: NodeTable, timers: Timers) -> None:
    """Check all invariants.

    Raises:
        InvariantViolated: One does not hold; with the story of the group where there is one.
    """
    for group in groups.open.values():
        for wrong in _of_group(group, nodes):
            raise InvariantViolated("\n".join([wrong, *groups.story.of(group.group_id)]))
    for wrong in (*_of_lanes(groups), *_of_nodes(groups, nodes), *_of_timers(groups, nodes, timers)):
        raise InvariantViolated(wrong)
    for wrong in _of_idleness(groups, nodes):
        raise InvariantViolated(wrong)


def _of_group(group: GroupRecord, nodes: NodeTable) -> Iterator[str]:
    if tuple(record.seed for record in group.records) != group.seeds:
        yield f"group {group.group_id}: a seed has changed"
    missing = sum(record.state is not IndexState.DONE for record in group.records)
    if missing != group.missing or not missing:
        yield f"group {group.group_id}: {missing} members are missing, {group.missing} are counted"
    for record in group.records:
        found, node = _whereabouts(record, nodes), record.node_id
        if found != [record.state] or (node is not None) != (record.state is IndexState.RUNNING):
            yield f"group {group.group_id} [{record.index}]: is {record.state}, found {found}, node {node}"


def _whereabouts(record: IndexRecord, nodes: NodeTable) -> list[IndexState]:
    """All the places where a record is to be found; there should be one."""
    found = [IndexState.QUEUED] if record.group.lane.queue.get(record.key) is record else []
    found += [IndexState.RUNNING for node in nodes.all.values() if node.running.get(record.key) is record]
    return found + ([IndexState.DONE] if record.result is not None else [])


def _of_lanes(groups: Groups) -> Iterator[str]:
    ring = groups.backlog.ring
    lanes: dict[Lane, None] = dict.fromkeys(group.lane for group in groups.open.values())
    lanes.update(dict.fromkeys((*ring, groups.backlog.singles)))
    for lane in lanes:
        if (lane in ring) != (bool(lane.queue) and not lane.gathering):
            yield f"a lane of {len(lane.queue)}, gathering {lane.gathering}, in turn {lane in ring}"
        for key, record in lane.queue.items():
            if key[0] not in groups.open or groups.open[key[0]].records[key[1]] is not record:
                yield f"{key} waits, but is no member of an open group"


def _of_nodes(groups: Groups, nodes: NodeTable) -> Iterator[str]:
    if sum(node.sound for node in nodes.all.values()) != nodes.sound:
        yield f"{nodes.sound} nodes are counted as sound"
    if any(nodes.all.get(node.node_id) is not node for node in nodes.free):
        yield "a lost node has room"
    for node in nodes.all.values():
        listed = node.position >= 0 and nodes.free[node.position] is node
        if listed != (node.room > 0) or node.counted != node.sound:
            yield f"node {node.node_id}: room {node.room}, listed {listed}, counted {node.counted}"
        if node.probe is not None and (node.pace is not Pace.SUSPECT or node.probe not in node.running):
            yield f"node {node.node_id}: probe {node.probe} does not run"
        for group_id, index in node.running:
            if group_id not in groups.open or groups.open[group_id].records[index].node_id != node.node_id:
                yield f"node {node.node_id}: ({group_id}, {index}) does not run there"


def _of_timers(groups: Groups, nodes: NodeTable, timers: Timers) -> Iterator[str]:
    """Each timer has somebody who waits for it, and whoever rests has a timer."""
    wanted = {group.timer_id for group in groups.open.values()}
    wanted |= {node.timer_id for node in nodes.all.values()}
    for timer_id, (kind, _) in timers.waiting.items():
        gathers = kind is TimerKind.GATHER and groups.backlog.singles.gathering
        if timer_id not in wanted and not gathers:
            yield f"nobody waits for timer {timer_id}"
    if not (wanted - {None}) <= timers.waiting.keys():
        yield "somebody waits for a timer that has fired"
    for node in nodes.all.values():
        if not _can_wake(node):
            yield f"node {node.node_id} rests for ever"


def _can_wake(node: Node) -> bool:
    if node.pace is Pace.HELD:
        return node.timer_id is not None
    return node.pace is not Pace.SUSPECT or (node.timer_id is None) != (node.probe is None)


def _of_idleness(groups: Groups, nodes: NodeTable) -> Iterator[str]:
    """Nothing waits that a node with room may take."""
    for node in nodes.free:
        for lane in groups.backlog.ring:
            for record in lane.queue.values():
                if may_run(record, node, nodes):
                    yield f"{record.key} waits, but node {node.node_id} has room for {node.room}"
