"""What an answer of a node means for the index and for the node. Must not place anything.

Source: design, Verdicts (infra laundering): a session death is tried once more and is a verdict the second time; a
host death is never charged to the verdict, and the third one poisons the index.
"""

from __future__ import annotations

from dataclasses import replace

from collimate_ray.core.events import IndexDone, IndexFailed
from collimate_ray.core.failures import Fate, fate_of
from collimate_ray.core.groups import Groups
from collimate_ray.core.nodes import NodeTable
from collimate_ray.core.policy import Policy
from collimate_ray.core.state import IndexRecord, IndexState
from collimate_ray.errors import InfraError, NodeLost, Poison
from collimate_ray.results import GradeResult, Verdict


class Answers:
    """Takes in verdicts, failures and losses of nodes."""

    def __init__(self, groups: Groups, nodes: NodeTable, policy: Policy) -> None:
        self._groups, self._nodes, self._policy = groups, nodes, policy

    def done(self, event: IndexDone, now: float) -> None:
        """Take in a verdict, unless its dispatch is superseded."""
        record = self._running(event)
        if record is None:
            return
        self._nodes.proved(self._nodes.all[event.node_id], verdict=True)
        self._nodes.release(record, now)
        self._finish(record, event.node_id, event.result, now)

    def failed(self, event: IndexFailed, now: float) -> None:
        """Take in a failure, unless its dispatch is superseded."""
        record = self._running(event)
        if record is None:
            return
        fate = fate_of(event.error)
        text = f"[{record.index}] {type(event.error).__name__} on node {event.node_id}: {fate.value}"
        self._groups.tell(record.group, now, text)
        self._judge_node(event.node_id, fate, now)
        self._nodes.release(record, now)
        self._judge_index(record, fate, event, now)

    def lost(self, node_id: str, now: float) -> None:
        """Take in the loss of a node: a host death of each index that ran there."""
        error = NodeLost("the node was lost", node_id)
        for record in self._nodes.lose(node_id):
            # the end of a group takes all its members off the node: these are not ours any more
            if record.state is IndexState.RUNNING:
                self._groups.tell(record.group, now, f"[{record.index}] node {node_id} lost")
                self._nodes.release(record, now)
                self._host_death(record, node_id, error, now)

    def _running(self, event: IndexDone | IndexFailed) -> IndexRecord | None:
        group = self._groups.open.get(event.group_id)
        if group is None or not 0 <= event.index < len(group.records):
            return None
        record = group.records[event.index]
        # a record that does not run has no node
        return record if (record.attempt, record.node_id) == (event.attempt, event.node_id) else None

    def _judge_node(self, node_id: str, fate: Fate, now: float) -> None:
        node = self._nodes.all[node_id]
        if fate is Fate.ELSEWHERE:
            self._nodes.drain(node_id, True)
        elif fate is Fate.LATER:
            self._nodes.hold(node, now)
        elif fate is Fate.SESSION_DEATH:
            self._nodes.proved(node, verdict=False)
        elif fate is Fate.HOST_DEATH:
            self._nodes.suspect(node, now)

    def _judge_index(self, record: IndexRecord, fate: Fate, event: IndexFailed, now: float) -> None:
        error, node_id = event.error, event.node_id
        if not isinstance(error, InfraError):
            self._groups.fail(record.group, error, now)
        elif fate is Fate.FINAL:
            self._groups.no_verdict(record, node_id, error, now)
        elif fate is Fate.SESSION_DEATH:
            self._session_death(record, node_id, now)
        elif fate is Fate.HOST_DEATH:
            self._host_death(record, node_id, error, now)
        else:
            self._groups.requeue(record, now)

    def _session_death(self, record: IndexRecord, node_id: str, now: float) -> None:
        record.session_deaths += 1
        if record.session_deaths >= self._policy.session_deaths:
            evidence = {"session_death": record.session_deaths}
            result = GradeResult(0.0, verdict=Verdict.CRASHED, evidence=evidence, seed=record.seed)
            self._finish(record, node_id, result, now)
            return
        record.charged += 1
        record.avoid = node_id
        self._groups.requeue(record, now)

    def _host_death(self, record: IndexRecord, node_id: str, error: InfraError, now: float) -> None:
        if error.admitted:  # else nothing of it had run: the candidate can't be the cause
            record.host_deaths += 1
            record.charged += 1
        if record.host_deaths >= self._policy.host_deaths:
            poison = Poison(f"{record.host_deaths} hosts died under it", node_id)
            self._groups.no_verdict(record, node_id, poison, now)
        else:
            self._groups.requeue(record, now)

    def _finish(self, record: IndexRecord, node_id: str, result: GradeResult, now: float) -> None:
        verdict = result.verdict.value if result.verdict else result.error
        self._groups.tell(record.group, now, f"[{record.index}] {verdict} on node {node_id}")
        queue_time_ms = record.queue_time_ms
        result = replace(result, attempt=record.charged, node_id=node_id, queue_time_ms=queue_time_ms)
        self._groups.finish(record, result, now)
