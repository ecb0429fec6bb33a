"""Binds what waits to nodes with room, in shards. Must not look at answers; see ``scheduler.py``.

Source: design, Core: work is bound to a node when a slot is free, never earlier; groups take turns; a shard is one
call. The cost of a shard does not grow with the number of nodes.
"""

from __future__ import annotations

from itertools import islice

from collimate_ray.core.commands import Dispatch, DispatchItem
from collimate_ray.core.nodes import Node, NodeTable
from collimate_ray.core.policy import Policy
from collimate_ray.core.state import Backlog, IndexRecord, Lane


def place(backlog: Backlog, nodes: NodeTable, policy: Policy, now: float) -> list[Dispatch]:
    """Dispatch what can be dispatched now; ``now`` in seconds.

    Returns:
        One ``Dispatch`` a shard. Afterwards no node has room, or nothing waits but what must not go to the nodes
        that have.
    """
    shards: list[Dispatch] = []
    stuck: list[Lane] = []
    while backlog and nodes.free:
        lane = backlog.pop()
        node = nodes.choose(next(iter(lane.queue.values())).avoid)
        records = _shard(lane, node, nodes, policy)
        if not records:
            stuck.append(lane)
            continue
        shards.append(Dispatch(node.node_id, tuple(_bind(record, node, nodes, now) for record in records)))
        backlog.offer(lane)
    backlog.put_back(stuck)
    return shards


def _shard(lane: Lane, node: Node, nodes: NodeTable, policy: Policy) -> list[IndexRecord]:
    """Choose what of a lane goes to a node; a fair share, so that a group spreads over the nodes with room."""
    waiting = len(lane.queue)
    share = max(policy.min_shard, -(-waiting // len(nodes.free)))
    size = min(node.room, waiting, share)
    fit = (record for record in lane.queue.values() if may_run(record, node, nodes))
    return list(islice(fit, size))


def may_run(record: IndexRecord, node: Node, nodes: NodeTable) -> bool:
    """Tell whether a record may go to a node: not to the one it is kept from, while there is another."""
    return record.avoid != node.node_id or not nodes.elsewhere(node.node_id)


def _bind(record: IndexRecord, node: Node, nodes: NodeTable, now: float) -> DispatchItem:
    del record.group.lane.queue[record.key]
    record.queue_time_ms = (now - record.queued_at) * 1e3
    nodes.take(node, record)
    return DispatchItem(record.group.group_id, record.index, record.attempt, record.seed)
