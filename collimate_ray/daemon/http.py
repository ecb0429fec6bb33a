"""The HTTP front: connections as an asyncio protocol, keep-alive, a closed connection cancels its request.

Must not know what a request means. A third-party HTTP/1.1 (h11 on streams) cost 0.37 ms of CPU for a request on a
connection of its own, a tenth of a grade and more; hence a protocol of our own (``parser.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

from collimate_ray.daemon.parser import MAX_HEADER_BYTES, Parser, Request, Unfit
from collimate_ray.sandbox.wire import STATUS_OF, ErrorCode

_log = logging.getLogger(__name__)

#: Time for a whole request from its first byte on, and for a client to take an answer, s. Loopback moves the largest
#: body in a fraction of a second.
_PATIENCE_S = 60.0
#: Bytes of requests that all connections together may hold, read or being answered: four of the largest and more.
_MAX_HELD_BYTES = 512 << 20
#: Open connections, at most; and never more than half of this process's descriptors, the others are for execs.
_MOST_CONNECTIONS = 16_384
#: How long what a refused client still sends is thrown away, s: closed at once, a kernel drops the answer as well.
_LINGER_S = 2.0
#: Connections that wait to be accepted: a group's worth of clients arrives at once.
_BACKLOG = 1024
#: How many of them are taken at a time. Without a descriptor left, asyncio tries, and logs, so often before it pauses.
_ACCEPTED_AT_ONCE = 8

#: method, target, body, whether it came by the admin socket -> status and JSON-able body, or lines of them
Handler = Callable[[str, str, bytes, bool], Awaitable[tuple[int, Any]]]


class Front:
    """Serves connections.

    Args:
        handler: Answers a request. A body that is an async iterator is sent as newline-delimited JSON, line by line.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        #: open connections, in the order of their last requests
        self.connections: dict[_Connection, None] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_connections = _MOST_CONNECTIONS if limit < 0 else min(_MOST_CONNECTIONS, limit // 2)
        #: bytes of requests that connections hold
        self.held = 0
        #: requests that are being answered
        self.busy = 0
        #: monotonic time of the last request's beginning or end, s
        self.last_request = time.monotonic()

    async def listen(self, listener: socket.socket, *, admin: bool = False) -> asyncio.Server:
        """Accept connections of a bound socket, TCP or unix.

        Args:
            listener: The socket.
            admin: Whether its requests may do what only operators may.
        """
        loop = asyncio.get_running_loop()
        factory = functools.partial(_Connection, self, admin)
        create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        server = await create(factory, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(_BACKLOG)
        return server

    async def close(self) -> None:
        """End every connection; requests that are being answered are cut off."""
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for connection in list(self.connections):
            connection.cut()
        if tasks:
            await asyncio.wait(tasks)

    def make_room(self) -> bool:
        """Close a connection that nobody uses if there are too many; False if all are used."""
        if len(self.connections) < self.most_connections:
            return True
        idle = next((one for one in self.connections if one.task is None and one.is_open), None)
        # there are others without a task only if they were refused: those were told by now
        for connection in [one for one in self.connections if one.task is None] if idle is None else [idle]:
            connection.cut()
        return idle is not None


class _Connection(asyncio.Protocol):
    """One connection: bytes in, requests to the handler one after the other, answers out."""

    def __init__(self, front: Front, admin: bool) -> None:
        self._front, self._admin = front, admin
        self._parser = Parser()
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        #: answers the request that was read, or None
        self.task: asyncio.Task[None] | None = None
        #: requests are still taken from it
        self.is_open = True
        self._held = 0
        self._deadline: asyncio.TimerHandle | None = None
        #: set while the transport takes no more
        self._full: asyncio.Future[None] | None = None

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        room = self._front.make_room()
        self._front.connections[self] = None
        if not room:
            self._refuse(Unfit(503, "at capacity: too many connections"), ErrorCode.AT_CAPACITY)

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        self._parser.feed(data)
        self._hold(len(data))
        if self.task is None:
            self._advance()
        elif self._parser.waiting > MAX_HEADER_BYTES:
            self._transport.pause_reading()  # pipelining without end: the answer comes first

    def eof_received(self) -> None:
        """Take the client's end as a hang-up: nobody shuts down one half and reads on."""
        self._finish()  # None is returned: the transport closes

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()
        self._front.connections.pop(self, None)
        self._parser = Parser()
        self._hold(-self._held)
        if self._full is not None and not self._full.done():
            self._full.set_result(None)

    def pause_writing(self) -> None:
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._full is not None and not self._full.done():
            self._full.set_result(None)
        self._full = None

    # reading

    def _advance(self) -> None:
        """Begin the next request, if it is there."""
        if not self.is_open:
            return
        try:
            request = self._parser.next()
        except Unfit as unfit:
            self._refuse(unfit)
            return
        if request is not None:
            self._wait_no_more()
            self._begin(request)
        elif self._held > MAX_HEADER_BYTES and self._front.held > _MAX_HELD_BYTES:
            self._refuse(Unfit(503, "at capacity: too many bytes of requests are held"), ErrorCode.AT_CAPACITY)
        elif self._parser.midway:
            if self._parser.must_continue():
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self._deadline is None:
                self._deadline = self._loop.call_later(_PATIENCE_S, self.cut)

    def _begin(self, request: Request) -> None:
        front = self._front
        front.busy += 1
        front.last_request = time.monotonic()
        front.connections[self] = front.connections.pop(self)  # to the end: it is the latest used
        self.task = self._loop.create_task(self._serve(request))
        self.task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        front = self._front
        front.busy -= 1
        front.last_request = time.monotonic()
        self.task = None
        self._hold(self._parser.waiting - self._held)
        if not task.cancelled() and task.exception() is not None:
            _log.error("http event=bug error=%r", task.exception(), exc_info=task.exception())
            self.cut()
        elif self.is_open:
            self._transport.resume_reading()
            self._advance()

    def _hold(self, more: int) -> None:
        self._held += more
        self._front.held += more

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # answering

    async def _serve(self, request: Request) -> None:
        try:
            status, payload = await self._front.handler(request.method, request.target, request.body, self._admin)
        except asyncio.CancelledError:
            if not self.is_open:
                raise
            # somebody cancelled the work, not the connection
            code = ErrorCode.CANCELLED
            status, payload = STATUS_OF[code], {"error": "cancelled", "error_code": code}
        if isinstance(payload, AsyncIterator):
            await self._send_lines(status, payload, request)
        else:
            await self._send(status, payload, request.keep_alive)
        if not request.keep_alive:
            self._finish()

    async def _send(self, status: int, payload: Any, keep_alive: bool) -> None:
        data = json.dumps(payload).encode("ascii")
        fields = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._transport.write(_head(status, fields, keep_alive) + data)
        await self._drained()

    async def _send_lines(self, status: int, lines: AsyncIterator[Any], request: Request) -> None:
        fields = "Content-Type: application/x-ndjson\r\n"
        if request.chunks:
            fields += "Transfer-Encoding: chunked\r\n"
        # to a client that does not know chunks, the end of the connection is the end of the answer
        self._transport.write(_head(status, fields, request.keep_alive))
        async with contextlib.aclosing(cast(Any, lines)):
            async for line in lines:
                data = json.dumps(line).encode("ascii") + b"\n"
                self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if request.chunks else data)
                await self._drained()
        if request.chunks:
            self._transport.write(b"0\r\n\r\n")

    async def _drained(self) -> None:
        """Wait until the client took what was sent; cut it off if it takes too long."""
        if self._full is None:
            return
        timer = self._loop.call_later(_PATIENCE_S, self.cut)
        try:
            await asyncio.shield(self._full)
        finally:
            timer.cancel()

    def _refuse(self, unfit: Unfit, code: str = ErrorCode.BAD_REQUEST) -> None:
        """Say once what was wrong, and close: where the next request begins is not known."""
        data = json.dumps({"error": unfit.message, "error_code": code}).encode("ascii")
        fields = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._transport.write(_head(unfit.status, fields, keep_alive=False) + data)
        self.is_open = False
        self._wait_no_more()
        self._transport.write_eof()
        self._loop.call_later(_LINGER_S, self._transport.abort)

    # the end

    def _finish(self) -> None:
        """Close after what was written; a request that is being answered is cancelled."""
        if not self.is_open:
            return
        self.is_open = False
        self._wait_no_more()
        if self.task is not None and self.task is not asyncio.current_task(self._loop):
            self.task.cancel()
        self._transport.close()
        # a client that does not take what was written keeps no descriptor for ever
        if self._transport.get_write_buffer_size():
            self._loop.call_later(_PATIENCE_S, self._transport.abort)

    def cut(self) -> None:
        """Close at once."""
        self._finish()
        self._transport.abort()


def _head(status: int, fields: str, keep_alive: bool) -> bytes:
    connection = "" if keep_alive else "Connection: close\r\n"
    return f"HTTP/1.1 {status} {_phrase(status)}\r\n{fields}{connection}\r\n".encode("ascii")


@functools.cache
def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Cancelled"
