"""A server on a real socket that answers by a script: what no honest daemon would do on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collimate_ray.sandbox.wire import STATUS_OF


@dataclass(frozen=True)
class Received:
    """One request as it came, and on which connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


#: What to do with a request: bytes to send, or a function of request and connection; the connection closes if it
#: returns False.
Action = bytes | Callable[[Received, socket.socket], bool]


def answer(payload: Any, status: int = 200, headers: str = "") -> bytes:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} Words\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def refused(code: str) -> bytes:
    return answer({"error": f"told: {code}", "error_code": code}, STATUS_OF[code])


def executed(stdout: str = "", **fields: Any) -> bytes:
    return answer({"id": "req_1", "stdout": stdout, "stderr": "", "exit_code": 0, "seed": "00" * 32, **fields})


def reset(_request: Received, connection: socket.socket) -> bool:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def closed(_request: Received, _connection: socket.socket) -> bool:
    return False


class ScriptedServer:
    """Answers the n-th request by the n-th action, and all later ones by the last.

    Args:
        path: Where to listen; on loopback TCP if None.
        actions: The script.
    """

    def __init__(self, path: Path | None, actions: Sequence[Action]) -> None:
        self.actions = list(actions)
        self.requests: list[Received] = []
        self.connections = 0
        #: set when a connection was closed from this side
        self.hung_up = threading.Event()
        #: set when the server stops, for actions that wait
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listener.bind(str(path) if path else ("127.0.0.1", 0))
        self._listener.listen(128)
        address = self._listener.getsockname()
        self.where = {"unix_socket": str(path)} if path else {"base_url": f"http://127.0.0.1:{address[1]}"}
        self._spawn(self._accept)

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[:1]:
            thread.join()
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        if self._path:
            self._path.unlink()

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with self._lock:
                self._open.add(connection)
            self._spawn(self._serve, connection, self.connections)

    def _serve(self, connection: socket.socket, number: int) -> None:
        stream = connection.makefile("rb")
        try:
            while (request := _read(stream, number)) and self._act(request, connection):
                pass
        except OSError:
            pass
        with self._lock:
            self._open.discard(connection)
        stream.close()
        connection.close()
        self.hung_up.set()

    def _act(self, request: Received, connection: socket.socket) -> bool:
        with self._lock:
            action = self.actions[min(len(self.requests), len(self.actions) - 1)]
            self.requests.append(request)
        if isinstance(action, bytes):
            connection.sendall(action)
            return True
        return action(request, connection)


def _read(stream: Any, number: int) -> Received | None:
    first = stream.readline()
    if not first:
        return None
    method, path, _ = first.decode().split(" ")
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))
    return Received(method, path, headers, body, number)
