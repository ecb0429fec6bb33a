"""The route table of the node-local wire: what each request means. Source: design/WIRE.md, "Routes".

Must not read sockets: a request comes in as method, path and body, an answer goes out as status and JSON.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Any
from urllib.parse import unquote

from collimate_ray.daemon import batch
from collimate_ray.daemon import body as bodies
from collimate_ray.daemon.admission import Refusal
from collimate_ray.daemon.health import health
from collimate_ray.daemon.isolation import Fence
from collimate_ray.daemon.logs import note
from collimate_ray.daemon.outcome import ExecRequest, Outcome
from collimate_ray.daemon.table import Table
from collimate_ray.sandbox.wire import ErrorCode

#: ``seed_ack`` is "verified" where these are pinned (design/WIRE.md).
_VERIFIED_BY = frozenset({"random", "urandom"})

Answer = tuple[int, Any]


class Routes:
    """Handlers of all routes.

    Args:
        table: Sessions and execs.
        fence: What stands between an exec and the machine.
        runner_version: Version of the preloaded runner.
        admin_socket: Path of the socket that operators use, or None: there is none.
    """

    def __init__(self, table: Table, fence: Fence, runner_version: str, admin_socket: str | None = None) -> None:
        self._table = table
        self._fence = fence
        self._runner_version = runner_version
        self._admin_socket = admin_socket

    async def handle(self, method: str, path: str, raw: bytes, admin: bool = False) -> Answer:
        """Answer one request; a refusal becomes its error body.

        Args:
            method: HTTP method.
            path: Request target, query and fragment are ignored.
            raw: Body.
            admin: Whether it came by the admin socket.

        Returns:
            HTTP status and JSON-able body, or an async iterator of lines.
        """
        parts = [unquote(part) for part in path.split("?")[0].strip("/").split("/")]
        if parts == ["v1", "drain"] and not admin:
            return self._forbidden()
        return await _answered(self._route(method, parts, raw))

    async def _route(self, method: str, parts: list[str], raw: bytes) -> Answer:
        match (method, parts):
            case ("GET", ["v1", "health"] | ["health"]):
                return 200, health(self._table, self._fence, self._runner_version, self._admin_socket)
            case ("POST", ["v1", "exec"] | ["exec"]):
                return await self._exec_once(bodies.parse(raw))
            case ("POST", ["v1", "exec", "batch"]):
                return self._exec_batch(bodies.parse(raw))
            case ("POST" | "DELETE", ["v1", "drain"]):
                return self._drain(method == "POST")
            case (_, ["v1", "sessions", *rest]):
                return await self._sessions(method, rest, raw)
            case ("DELETE", ["v1", "execs", exec_id]):
                self._table.cancel(exec_id)
                return 200, {"cancelled": True, "id": exec_id}
            case ("POST" | "DELETE", ["v1", "owners", owner]):
                return await self._owner(method, bodies.name_of("owner", owner), raw)
        raise self._not_found(method, parts)

    async def _sessions(self, method: str, rest: list[str], raw: bytes) -> Answer:
        match (method, rest):
            case ("POST", []):
                return await self._create(bodies.parse(raw))
            case ("GET", []):
                return 200, [session.info() for session in self._table.listed()]
            case ("GET", [name]):
                return 200, self._table.find(name).info()
            case ("DELETE", [name]):
                return await self._delete(name)
            case ("POST", [name, "exec"]):
                return await self._session_exec(name, bodies.parse(raw))
        raise self._not_found(method, ["v1", "sessions", *rest])

    def _not_found(self, method: str, parts: list[str]) -> Refusal:
        return Refusal(ErrorCode.NOT_FOUND, f"no such route: {method} /{'/'.join(parts)[:100]}")

    async def _create(self, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        template = bodies.template_of(body, self._table.warm.names)
        bodies.check_egress(body, self._fence.egress)
        owner = self._lease(body)
        session = await self._table.create(template, owner)
        note("session.created", session=session.session_id, template=template, owner=owner)
        return 201, {
            "session_id": session.session_id,
            "template_id": template,
            "fork_time_ms": session.fork_time_ms,
            "create_time_ms": _since_ms(started),
            "egress": {"mode": self._fence.egress},
        }

    async def _delete(self, name: str) -> Answer:
        session = self._table.sessions.get(name)
        deleted = session is not None and await self._table.destroy(session)
        if deleted:
            note("session.deleted", session=name)
        return (200 if deleted else 404), {"deleted": deleted, "session_id": name}

    async def _exec_once(self, body: dict[str, Any]) -> Answer:
        template = bodies.template_of(body, self._table.warm.names)
        return await self._exec_in_fresh(template, self._lease(body), body)

    async def _exec_in_fresh(self, template: str, owner: str | None, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        request = bodies.exec_request(body, self._fence.egress)
        outcome = await self._table.run_once(template, owner, request)
        return self._outcome(request, outcome, started, template)

    def _exec_batch(self, body: dict[str, Any]) -> Answer:
        template = bodies.template_of(body, self._table.warm.names)
        execs, deadline_s = bodies.batch(body)
        owner = self._lease(body)
        note("batch.began", template=template, owner=owner, execs=len(execs), deadline_s=deadline_s)

        async def run(each: Any) -> Answer:
            if not isinstance(each, dict):
                return _refused(bodies.bad("execs", "objects", each))
            return await _answered(self._exec_in_fresh(template, owner, each))

        width = batch.WIDTH_A_SLOT * self._table.gate.slots
        return 200, batch.lines(execs, run, width=width, deadline_s=deadline_s)

    async def _session_exec(self, name: str, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        session = self._table.find(name)
        request = bodies.exec_request(body, self._fence.egress)
        outcome = await self._table.run_in(session, request)
        if outcome.status == "cancelled":
            self._table.find(name)  # it was the session that ended
        return self._outcome(request, outcome, started, name)

    def _outcome(self, request: ExecRequest, outcome: Outcome, started: float, where: str) -> Answer:
        total_ms = _since_ms(started)
        note("exec.ended", id=request.exec_id, where=where, status=outcome.status, ms=total_ms)
        if outcome.status == "cancelled":
            return _refused(Refusal(ErrorCode.CANCELLED, f"cancelled: {request.exec_id}"))
        return 200, {
            "id": request.exec_id,
            "stdout": outcome.output.decode("utf-8", "replace"),
            "stderr": "",
            "exit_code": outcome.exit_code,
            "fork_time_ms": outcome.fork_time_ms,
            "exec_time_ms": outcome.exec_time_ms,
            "total_time_ms": total_ms,
            "seed": request.seed,
            "seed_ack": _seed_ack(request, outcome),
            "seed_pins": list(outcome.pins),
            "status": outcome.status,
            "signal": outcome.signal,
            "cpu_time_ms": outcome.cpu_time_ms,
            "max_rss_kib": outcome.max_rss_kib,
            "isolation": self._fence.tier,
        }

    def _forbidden(self) -> Answer:
        where = (
            f"use the admin socket {self._admin_socket}" if self._admin_socket else "this daemon has no admin socket"
        )
        return _refused(Refusal(ErrorCode.FORBIDDEN, f"forbidden: {where}"))

    def _drain(self, begin: bool) -> Answer:
        gate = self._table.gate
        if begin:
            gate.drain()
        else:
            gate.undrain()
        note("drain.began" if begin else "drain.ended", logging.WARNING, running=len(self._table.execs))
        return 200, {"status": "draining" if begin else "ok", "running": len(self._table.execs)}

    async def _owner(self, method: str, owner: str, raw: bytes) -> Answer:
        if method == "POST":
            ttl_s = bodies.ttl_of(bodies.parse(raw))
            self._table.renew(owner, ttl_s)
            return 200, {"owner": owner, "ttl_seconds": ttl_s}
        known = owner in self._table.owners
        ended = await self._table.drop_owner(owner)
        return 200, {"owner": owner, "deleted": known, "sessions": ended}

    def _lease(self, body: dict[str, Any]) -> str | None:
        self._table.gate.check_open()
        lease = bodies.lease_of(body)
        if lease is None:
            return None
        self._table.renew(*lease)
        return lease[0]


async def _answered(work: Awaitable[Answer]) -> Answer:
    """Give its answer; a refusal becomes its error body, and so does a lack of descriptors, disk or memory."""
    try:
        return await work
    except Refusal as refusal:
        note("refused", code=refusal.code)
        return _refused(refusal)
    except (OSError, MemoryError) as error:  # this request fails, the daemon lives
        note("failed", logging.WARNING, error=error)
        words = getattr(error, "strerror", None) or "out of memory"
        return _refused(Refusal(ErrorCode.INTERNAL, f"the daemon failed: {words}"))


def _refused(refusal: Refusal) -> Answer:
    return refusal.status, {"error": refusal.message, "error_code": refusal.code}


def _seed_ack(request: ExecRequest, outcome: Outcome) -> str:
    if request.kind == "command":
        return "off"  # a shell has nothing to seed
    return "verified" if _VERIFIED_BY.issubset(outcome.pins) else "no-ack"


def _since_ms(started: float) -> float:
    return round((time.monotonic() - started) * 1e3, 3)
