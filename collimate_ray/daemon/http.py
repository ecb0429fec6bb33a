"""The HTTP front: strict HTTP/1.1 on asyncio streams, keep-alive, a closed connection cancels its request.

Must not know what a request means. Sources: RFC 9112 as h11 keeps it; limits: header
64 KiB, body 64 MiB, 60 s of silence in the middle of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import h11

from collimate_ray.sandbox.wire import ErrorCode

_log = logging.getLogger(__name__)

#: Largest header, bytes.
MAX_HEADER_BYTES = 64 << 10
#: Largest body, bytes: files and stdin of an exec.
MAX_BODY_BYTES = 64 << 20
#: Silence after which a half-sent request, or a half-read answer, is cut off, s.
_SILENCE_S = 60.0
_CHUNK = 64 << 10

Handler = Callable[[str, str, bytes], Awaitable[tuple[int, Any]]]


class _Unfit(Exception):
    """The request is HTTP, but not one that is served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


class Front:
    """Serves connections.

    Args:
        handler: Answers a request: method, target, body -> status, JSON-able body.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()
        #: requests that are being answered
        self.busy = 0
        #: monotonic time of the last request's beginning or end, s
        self.last_request = time.monotonic()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end (``asyncio.start_server``'s callback)."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = _Connection(reader, writer)
        try:
            while await self._one(connection):
                pass
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the client is gone or too slow, or the daemon ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def close(self) -> None:
        """End every connection; requests that are being answered are cut off."""
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _one(self, connection: _Connection) -> bool:
        """Serve one request; False when the connection is done."""
        try:
            request = await connection.receive()
        except (h11.RemoteProtocolError, _Unfit) as error:
            await connection.refuse(error)
            return False
        if request is None:
            return False
        self.busy += 1
        self.last_request = time.monotonic()
        try:
            answer = await self._answer(connection, *request)
            return answer is not None and await connection.send(*answer)
        finally:
            self.busy -= 1
            self.last_request = time.monotonic()

    async def _answer(self, connection: _Connection, method: str, target: str, body: bytes) -> tuple[int, Any] | None:
        """Answer, or give up (None) when the client closes the connection."""
        work = asyncio.ensure_future(self._handler(method, target, body))
        closed = asyncio.ensure_future(connection.wait_closed())
        try:
            await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None
            if work.cancelled():
                return 499, {"error": "cancelled", "error_code": "cancelled"}
            return work.result()
        except OSError as error:  # no descriptor, no room on the disk: this request fails, the daemon lives
            _log.warning("request failed: %s", error)
            return 500, {"error": f"the daemon failed: {error.strerror}", "error_code": "internal"}
        finally:
            work.cancel()
            closed.cancel()
            await asyncio.gather(work, closed, return_exceptions=True)


class _Connection:
    """One connection: h11 on a pair of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def receive(self) -> tuple[str, str, bytes] | None:
        """Read one request: method, target, body. None at the end of the connection.

        Raises:
            h11.RemoteProtocolError: It is not HTTP/1.1.
            asyncio.TimeoutError: Silence in the middle of it.
        """
        request: h11.Request | None = None
        parts: list[bytes] = []
        size = 0
        while True:
            event = await self._event(idle=request is None)
            if isinstance(event, h11.Request):
                request = event
                _check_headers(request)
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                if size > MAX_BODY_BYTES:
                    raise _Unfit(413, f"body: expected at most {MAX_BODY_BYTES} bytes, found more")
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                return (
                    request.method.decode("ascii"),
                    request.target.decode("ascii", "replace"),
                    b"".join(parts),
                )
            else:
                return None

    async def _event(self, idle: bool) -> Any:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            # a client may keep an unused connection as long as it likes; a half-sent header may not wait for ever
            silence = None if idle and not self._http.trailing_data[0] else _SILENCE_S
            self._http.receive_data(await asyncio.wait_for(self._reader.read(_CHUNK), silence))

    async def wait_closed(self) -> None:
        """Return when the client closes; what it sends meanwhile is kept for the next request."""
        kept = 0
        while data := await self._reader.read(_CHUNK):
            self._http.receive_data(data)
            kept += len(data)
            if kept > MAX_HEADER_BYTES:  # pipelining without end: read no more before this one is answered
                await asyncio.Event().wait()
        self._http.receive_data(b"")

    async def send(self, status: int, payload: Any) -> bool:
        """Send an answer; True if the connection can take another request."""
        data = json.dumps(payload).encode("ascii")
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        http = self._http
        self._writer.write(http.send(h11.Response(status_code=status, headers=headers)) or b"")
        self._writer.write(http.send(h11.Data(data=data)) or b"")
        self._writer.write(http.send(h11.EndOfMessage()) or b"")
        await asyncio.wait_for(self._writer.drain(), _SILENCE_S)
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    async def refuse(self, error: h11.RemoteProtocolError | _Unfit) -> None:
        """Say once what was wrong, if there is still somebody to say it to."""
        status = error.status if isinstance(error, _Unfit) else 400
        message = error.message if isinstance(error, _Unfit) else f"not HTTP/1.1: {error}"
        with contextlib.suppress(h11.LocalProtocolError, OSError):
            await self.send(status, {"error": message, "error_code": ErrorCode.BAD_REQUEST})


def _check_headers(request: h11.Request) -> None:
    # h11 bounds what it has not understood yet; a header that came in the last piece may still be larger
    if len(request.target) + sum(len(name) + len(value) for name, value in request.headers) > MAX_HEADER_BYTES:
        raise _Unfit(431, f"header: expected at most {MAX_HEADER_BYTES} bytes, found more")
    for name, value in request.headers:
        if name == b"origin":
            raise _Unfit(400, "Origin: expected none: pages in a browser must not drive this daemon")
        # more than twelve digits are too many whatever they say, and int() balks at thousands
        if name == b"content-length" and (len(value) > 12 or int(value) > MAX_BODY_BYTES):
            raise _Unfit(413, f"body: expected at most {MAX_BODY_BYTES} bytes, found {value[:20].decode()}")
