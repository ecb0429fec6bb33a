"""One HTTP exchange over TCP or a unix socket, with keep-alive. Source: design/WIRE.md, "Which transport".

Plain sockets and the standard library's reader of answers: a call through ``requests`` cost three times the CPU of one
here (0.35 against 0.11 ms), as much as a tenth of a grade, on cores that the grades themselves need.

Must not retry, read JSON or know an error code: that is ``client.py``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from collimate_ray.errors import ConfigError
from collimate_ray.sandbox import wire

#: Largest answer read, bytes. One exec's output, each of its bytes as a six-character escape, and room for the other
#: fields: with less, a candidate could turn a flood of control characters into an infra error.
MAX_RESPONSE_BYTES = 6 * wire.MAX_OUTPUT_BYTES + (1 << 20)

#: Longest wait for a connection, s. Loopback and unix sockets connect at once or not at all; a full TCP backlog
#: drops SYNs, which are sent again after 1, 3 and 7 s.
CONNECT_TIMEOUT_S = 10.0

#: Bytes read at a time: bounds what a length that lies can cost.
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, read to its end.

    Attributes:
        status: HTTP status, 100 to 599.
        body: The body as it came, at most ``MAX_RESPONSE_BYTES`` bytes.
    """

    status: int
    body: bytes


class AnswerTooLarge(Exception):
    """The answer's body, or one line of it, is over ``MAX_RESPONSE_BYTES``."""


class NeverSent(Exception):
    """There was no connection: nothing reached the daemon. ``__cause__`` says why."""


class Answer:
    """An HTTP answer whose head has come. A context manager: left early, it closes the connection.

    Args:
        transport: Takes the connection back.
        connection: Where the answer comes from.
        response: Its head and the reader of its body.
    """

    def __init__(self, transport: Transport, connection: socket.socket, response: http.client.HTTPResponse) -> None:
        self._transport, self._connection, self._response = transport, connection, response
        self._whole = False

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        reusable = self._whole and not self._response.will_close
        self._response.close()
        if reusable:
            self._transport.keep(self._connection)
        else:
            self._connection.close()

    @property
    def status(self) -> int:
        """HTTP status, 100 to 599."""
        return self._response.status

    def reply(self) -> Reply:
        """Read the body to its end.

        Raises:
            AnswerTooLarge: It is over ``MAX_RESPONSE_BYTES``.
            Exception: What http.client and the socket raise.
        """
        if (self._response.length or 0) > MAX_RESPONSE_BYTES:
            raise AnswerTooLarge
        parts: list[bytes] = []
        size = 0
        while part := self._response.read(_PART_BYTES):
            parts.append(part)
            size += len(part)
            if size > MAX_RESPONSE_BYTES:
                raise AnswerTooLarge
        self._check_whole(size)
        return Reply(self.status, b"".join(parts))

    def lines(self, patience_s: float, deadline: float | None) -> Iterator[bytes]:
        """Give the body's lines as they come.

        Args:
            patience_s: Longest silence, s.
            deadline: Monotonic time past which nothing is waited for, s, or None.

        Raises:
            AnswerTooLarge: A line is over ``MAX_RESPONSE_BYTES``.
            Exception: What http.client and the socket raise.
        """
        pieces: list[bytes] = []
        size = 0
        while part := self._part(patience_s, deadline):
            *ends, last = part.split(b"\n")
            for end in ends:
                yield b"".join([*pieces, end])
                pieces, size = [], 0
            pieces.append(last)
            size += len(last)
            if size > MAX_RESPONSE_BYTES:
                raise AnswerTooLarge
        self._check_whole(0)
        if size:
            yield b"".join(pieces)

    def _part(self, patience_s: float, deadline: float | None) -> bytes:
        """Read what has come, empty at the end. Not ``readline``: it takes a stream that is cut for one that ended."""
        left = patience_s if deadline is None else min(patience_s, deadline - time.monotonic())
        self._connection.settimeout(max(left, 0.001))  # 0 would mean: do not block
        return self._response.read1(_PART_BYTES)

    def _check_whole(self, size: int) -> None:
        if self._response.length:  # what is left of the length that was declared
            raise http.client.IncompleteRead(b"x" * size, self._response.length)
        self._whole = True


class Transport:
    """Connections to one daemon. Thread-safe, and safe to use in a forked child.

    Args:
        base_url: ``http://host:port`` of the daemon; unused with ``unix_socket``.
        unix_socket: Path of the daemon's socket, at most 107 bytes.
        pool_size: Idle connections kept, at least 1. More may be open at once; they are closed after use.

    Raises:
        ConfigError: The URL is not http(s) with a host, or the path is empty or too long.
    """

    def __init__(self, base_url: str, unix_socket: str | None, pool_size: int) -> None:
        self.base_url = "http://localhost" if unix_socket is not None else checked_url(base_url)
        self.unix_socket = None if unix_socket is None else checked_path(unix_socket)
        self._url = urlsplit(self.base_url)
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        # a compressed body could not be bounded by its length
        host = self._url.netloc.rpartition("@")[2]
        self._fields = f"Host: {host}\r\nAccept-Encoding: identity\r\n"
        self._pool_size = pool_size
        self._forget()

    def _forget(self) -> None:
        #: idle connections, the one used last at the end; ``append`` and ``pop`` are atomic
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()

    def open(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        """Send one request and read the head of its answer.

        Args:
            method: HTTP method.
            path: Path of the route, quoted.
            body: JSON, or None.
            timeout_s: Longest silence of the socket, s, above 0.

        Returns:
            The answer, whatever its status.

        Raises:
            NeverSent: There was no connection.
            Exception: What http.client and the socket raise.
        """
        connection = self._connection(timeout_s)
        try:
            connection.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError):  # a server that refuses a large body early: its answer tells
                connection.sendall(self._request(method, path, body))
            response = http.client.HTTPResponse(connection, method=method)
            response.begin()
        except BaseException:
            connection.close()
            raise
        return Answer(self, connection, response)

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._url.path}{path} HTTP/1.1\r\n{self._fields}"
        if body is None:
            return f"{head}\r\n".encode("ascii")
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode("ascii") + body

    def _connection(self, timeout_s: float) -> socket.socket:
        """Give an idle connection that the daemon has not closed, or a new one."""
        if self._pid != os.getpid():  # a forked child must not share sockets: it would read its parent's answers
            self._forget()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not _readable(connection):
                return connection
            connection.close()
        try:
            return self._dialled(min(timeout_s, CONNECT_TIMEOUT_S))
        except OSError as error:
            raise NeverSent from error

    def _dialled(self, timeout_s: float) -> socket.socket:
        if self.unix_socket is None:
            port = self._url.port or (80 if self._tls is None else 443)
            sock = socket.create_connection((self._url.hostname or "", port), timeout_s)
        else:
            sock = socket.socket(socket.AF_UNIX)
        try:
            if self.unix_socket is not None:
                sock.settimeout(timeout_s)
                sock.connect(self.unix_socket)
                return sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=self._url.hostname)
        except BaseException:
            sock.close()
            raise

    def keep(self, connection: socket.socket) -> None:
        """Take a connection back, whose last answer was read to its end."""
        if self._pid == os.getpid() and len(self._idle) < self._pool_size:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took it
                self._idle.pop().close()


def _readable(connection: socket.socket) -> bool:
    """Tell whether an idle connection has something to read: it was closed, or something unasked came."""
    look = select.poll()
    look.register(connection, select.POLLIN)
    return bool(look.poll(0))


def checked_url(url: str) -> str:
    """Check a daemon's URL and cut its final slashes.

    Raises:
        ConfigError: It is not ``http://`` or ``https://`` with a host and a valid port.
    """
    problem = ConfigError(f"base_url: expected http://HOST:PORT, found {url!r}")
    try:
        valid = url.isascii() and url.isprintable() and " " not in url and _names_host(urlsplit(url))
    except (ValueError, AttributeError, TypeError) as error:
        raise problem from error
    if not valid:
        raise problem
    return url.rstrip("/")


def _names_host(parts: SplitResult) -> bool:
    host = parts.hostname or ""
    host.encode("idna")  # a UnicodeError, which is a ValueError, where a part of it is empty or too long
    plain = not (parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and plain


def checked_path(path: str) -> str:
    """Check the path of a unix socket.

    Raises:
        ConfigError: It is empty or longer than the kernel takes.
    """
    size = len(os.fsencode(path))
    if not 0 < size <= wire.MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"unix_socket: expected a path of 1 to {wire.MAX_SOCKET_PATH_BYTES} bytes, found {size}: {path!r}"
        )
    return path
