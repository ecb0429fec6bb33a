"""One HTTP exchange over TCP or a unix socket, with keep-alive. Source: design/WIRE.md, "Which transport".

Built on the transport adapter of ``requests`` alone, without a ``Session``: the adapter's urllib3 pools are documented
as thread-safe and a Session is not, and the wire has no cookies, redirects, proxies, netrc or authentication for
which one would be needed (a quarter less CPU a request, measured).

Must not retry, read JSON or know an error code: that is ``client.py``.
"""

from __future__ import annotations

import functools
import http.client
import os
import socket
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from collimate_ray.errors import ConfigError
from collimate_ray.sandbox import wire

#: Largest answer read, bytes. One exec's output, each of its bytes as a six-character escape, and room for the other
#: fields: with less, a candidate could turn a flood of control characters into an infra error.
MAX_RESPONSE_BYTES = 6 * wire.MAX_OUTPUT_BYTES + (1 << 20)

#: Longest wait for a connection, s. Loopback and unix sockets connect at once or not at all; a full TCP backlog
#: drops SYNs, which are sent again after 1, 3 and 7 s.
CONNECT_TIMEOUT_S = 10.0


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
    """The answer's body is over ``MAX_RESPONSE_BYTES``."""


class UnixConnection(HTTPConnection):
    """An HTTP connection to a unix socket; host and port are only words in its Host header."""

    def __init__(self, socket_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.socket_path = socket_path

    def _new_conn(self) -> socket.socket:
        try:
            return self._dialled()
        except OSError as error:
            raise NewConnectionError(self, f"{self.socket_path}: {error.strerror or error}") from error

    def _dialled(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self.socket_path)
        except BaseException:
            sock.close()
            raise
        return sock


class UnixPool(HTTPConnectionPool):
    """A pool of ``UnixConnection``."""

    def __init__(self, socket_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # urllib3 only calls it, so a partial serves for the class
        self.ConnectionCls = functools.partial(UnixConnection, socket_path)  # type: ignore[assignment]


class UnixAdapter(HTTPAdapter):
    """A transport adapter whose every connection goes to one unix socket."""

    def __init__(self, socket_path: str, **kwargs: Any) -> None:
        self._socket_path = socket_path
        super().__init__(**kwargs)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pool manager, as ``HTTPAdapter`` does, and point it at the socket."""
        super().init_poolmanager(*args, **kwargs)
        pool = functools.partial(UnixPool, self._socket_path)
        self.poolmanager.pool_classes_by_scheme = {"http": pool}


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
        self._pool_size = pool_size
        self._open()

    def _open(self) -> None:
        # max_retries is 0 by default: whether to send again is decided in client.py
        size = self._pool_size
        if self.unix_socket is None:
            self._adapter = HTTPAdapter(pool_connections=1, pool_maxsize=size)
        else:
            self._adapter = UnixAdapter(self.unix_socket, pool_connections=1, pool_maxsize=size)
        self._pid = os.getpid()

    def exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        """Send one request and read its whole answer.

        Args:
            method: HTTP method.
            path: Path of the route, quoted.
            body: JSON, or None.
            timeout_s: Longest silence of the socket, s, above 0.

        Returns:
            The answer, whatever its status.

        Raises:
            AnswerTooLarge: The body is over ``MAX_RESPONSE_BYTES``.
            Exception: What requests, urllib3 and the socket raise.
        """
        if self._pid != os.getpid():  # a forked child must not share sockets: it would read its parent's answers
            self._open()
        # a compressed body could not be bounded by its length
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        request = requests.Request(method, self.base_url + path, headers=headers, data=body).prepare()
        timeouts = (min(timeout_s, CONNECT_TIMEOUT_S), timeout_s)
        with self._adapter.send(request, stream=True, timeout=timeouts) as response:
            return Reply(response.status_code, _read(response))

    def close(self) -> None:
        """Close the idle connections."""
        self._adapter.close()


def _read(response: requests.Response) -> bytes:
    declared = response.headers.get("Content-Length", "")
    if declared.isdecimal() and int(declared) > MAX_RESPONSE_BYTES:
        raise AnswerTooLarge
    parts: list[bytes] = []
    size = 0
    # requests' own iter_content would hide the kind of failure; a MiB at a time bounds what a lying length costs
    while part := response.raw.read(1 << 20, decode_content=False):
        parts.append(part)
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise AnswerTooLarge
    if declared.isdecimal() and size < int(declared):  # urllib3 1 lets it pass
        raise http.client.IncompleteRead(b"", int(declared) - size)
    return b"".join(parts)


def never_sent(error: BaseException) -> bool:
    """Tell whether an exchange's error proves that nothing reached the daemon: there was no connection."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(reason, NewConnectionError | ConnectTimeoutError)


def checked_url(url: str) -> str:
    """Check a daemon's URL and cut its final slashes.

    Raises:
        ConfigError: It is not ``http://`` or ``https://`` with a host and a valid port.
    """
    problem = ConfigError(f"base_url: expected http://HOST:PORT, found {url!r}")
    try:
        parts = requests.compat.urlparse(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError) as error:
        raise problem from error
    if not valid:
        raise problem
    return url.rstrip("/")


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
