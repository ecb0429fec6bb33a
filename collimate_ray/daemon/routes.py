"""The route table of the node-local wire: what each request means. Source: design/WIRE.md, "Routes".

Must not read sockets: a request comes in as method, path and body, an answer goes out as status and JSON.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any
from urllib.parse import unquote

from collimate_ray.daemon import body as bodies
from collimate_ray.daemon.admission import Refusal
from collimate_ray.daemon.outcome import ExecRequest, Outcome
from collimate_ray.daemon.table import Table
from collimate_ray.sandbox.wire import ErrorCode

#: Template ids; the second is the first's short name, as the published SDK's own stand-in calls it.
TEMPLATES = ("python", "py")
#: What this daemon adds to the plain wire and really does.
FEATURES = ("usage", "limits", "stdin", "runner", "cancel", "owner")
#: What stands between an exec and the machine here.
TIER = "rlimits"
#: nginx's number for "the client went away", the nearest there is to "cancelled".
CANCELLED_STATUS = 499

Answer = tuple[int, Any]


class Routes:
    """Handlers of all routes.

    Args:
        table: Sessions and execs.
        isolation: What is in force, short names.
        runner_version: Version of the preloaded runner.
    """

    def __init__(self, table: Table, isolation: tuple[str, ...], runner_version: str) -> None:
        self._table = table
        self._isolation = list(isolation)
        self._runner_version = runner_version
        self._version = importlib.metadata.version("collimate_ray")

    async def handle(self, method: str, path: str, raw: bytes) -> Answer:
        """Answer one request; a refusal becomes its error body.

        Args:
            method: HTTP method.
            path: Request target, query and fragment are ignored.
            raw: Body.

        Returns:
            HTTP status and JSON-able body.
        """
        parts = [unquote(part) for part in path.split("?")[0].strip("/").split("/")]
        try:
            return await self._route(method, parts, raw)
        except Refusal as refusal:
            return error(refusal.code, refusal.message, refusal.status)

    async def _route(self, method: str, parts: list[str], raw: bytes) -> Answer:
        match (method, parts):
            case ("GET", ["v1", "health"] | ["health"]):
                return 200, self._health()
            case ("POST", ["v1", "exec"] | ["exec"]):
                return await self._exec_once(bodies.parse(raw))
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

    def _health(self) -> dict[str, Any]:
        table = self._table
        return {
            "status": "draining" if table.gate.draining else "ok",
            "sessions": len(table.listed()),
            "running": len(table.execs),
            "max_inflight": table.gate.slots,
            "queued": table.gate.queued,
            "templates": list(TEMPLATES),
            "version": self._version,
            "features": list(FEATURES),
            "tier": TIER,
            "isolation": self._isolation,
            "egress": "open",
            "runner_version": self._runner_version,
            "slots": table.gate.slots,
            "memory_mib": table.gate.memory_mib,
            "pid": os.getpid(),
            "uid": os.getuid(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        }

    async def _create(self, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        template = bodies.template_of(body, TEMPLATES)
        bodies.check_egress(body)
        owner = self._lease(body)
        session = self._table.create(template, owner)
        spent_ms = _since_ms(started)
        return 201, {
            "session_id": session.session_id,
            "template_id": template,
            "fork_time_ms": spent_ms,
            "create_time_ms": spent_ms,
        }

    async def _delete(self, name: str) -> Answer:
        session = self._table.sessions.get(name)
        deleted = session is not None and await self._table.destroy(session)
        return (200 if deleted else 404), {"deleted": deleted, "session_id": name}

    async def _exec_once(self, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        template = bodies.template_of(body, TEMPLATES)
        request = bodies.exec_request(body)
        outcome = await self._table.run_once(template, self._lease(body), request)
        return self._outcome(request, outcome, started)

    async def _session_exec(self, name: str, body: dict[str, Any]) -> Answer:
        started = time.monotonic()
        session = self._table.find(name)
        request = bodies.exec_request(body)
        outcome = await self._table.run_in(session, request)
        if outcome.status == "cancelled":
            self._table.find(name)  # it was the session that ended
        return self._outcome(request, outcome, started)

    def _outcome(self, request: ExecRequest, outcome: Outcome, started: float) -> Answer:
        if outcome.status == "cancelled":
            return error("cancelled", f"cancelled: {request.exec_id}", CANCELLED_STATUS)
        return 200, {
            "id": request.exec_id,
            "stdout": outcome.output.decode("utf-8", "replace"),
            "stderr": "",
            "exit_code": outcome.exit_code,
            "fork_time_ms": outcome.fork_time_ms,
            "exec_time_ms": outcome.exec_time_ms,
            "total_time_ms": _since_ms(started),
            "seed": request.seed,
            # `random` is seeded for code, the system's generators are not; a shell is not seeded at all
            "seed_ack": "off" if request.kind == "command" else "no-ack",
            "status": outcome.status,
            "signal": outcome.signal,
            "cpu_time_ms": outcome.cpu_time_ms,
            "max_rss_kib": outcome.max_rss_kib,
            "isolation": TIER,
        }

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


def error(code: str, message: str, status: int) -> Answer:
    """Make an error answer of the wire."""
    return status, {"error": message, "error_code": code}


def _since_ms(started: float) -> float:
    return round((time.monotonic() - started) * 1e3, 3)
