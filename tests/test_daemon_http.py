"""The HTTP front against clients that do not keep to HTTP, or to manners: in a daemon, and with handlers of our own."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys

import pytest
from daemon_harness import Daemon

from collimate_ray.daemon import http
from collimate_ray.daemon.http import Front

#: Longest wait for what must come, s: for hangs only.
HANG_S = 60


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(socket=str(tmp_path_factory.mktemp("d") / "serve.sock")) as running:
        yield running
        running.stop()


def talk(daemon, *pieces):
    """Send pieces, read to the end of the connection."""
    with daemon.raw() as raw:
        for piece in pieces:
            try:
                raw.sendall(piece)
            except BrokenPipeError:
                break
        got = b""
        try:
            while chunk := raw.recv(65536):
                got += chunk
        except ConnectionResetError:
            pass
        return got


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /v1/health HTTP/1.1\r\n\r\n",  # no Host
        b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_400_and_a_closed_connection(daemon, bytes_sent):
    answer = talk(daemon, bytes_sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert 400 <= int(head.split()[1]) < 502
    assert json.loads(body)["error_code"] == "bad_request"
    assert daemon.call("GET", "/v1/health")[0] == 200


def test_body_over_the_cap_is_refused_before_it_is_read(daemon):
    head = b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    assert b"413" in talk(daemon, head % ((64 << 20) + 1)).split(b"\r\n")[0]
    assert b" 4" in talk(daemon, head.replace(b"%d", b"9" * 5000)).split(b"\r\n")[0]


def test_pages_of_a_browser_are_refused(daemon):
    answer = talk(daemon, b"GET /v1/health HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_chunked_body_and_keep_alive_and_pipelining(daemon):
    body = json.dumps({"template_id": "py", "command": "echo hi"}).encode()
    chunked = (
        b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%s\r\n" % (10, body[:10])
        + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body) - 10, body[10:])
    )
    last = b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = talk(daemon, chunked + chunked + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.count(b'"stdout": "hi\\n"') == 2


def test_one_connection_serves_many_requests(daemon):
    connection = daemon.connect()
    for _ in range(50):
        connection.request("GET", "/v1/health")
        assert connection.getresponse().read()
    sock = connection.sock
    assert sock is not None  # never closed in between
    connection.close()


def test_expect_continue(daemon):
    body = b'{"template_id": "py", "command": "true"}'
    head = b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with daemon.raw() as raw:
        raw.sendall(head % len(body))
        assert raw.recv(65536).startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def test_half_sent_requests_and_hang_ups_harm_nobody(daemon):
    half = b"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    open_ones = [daemon.raw() for _ in range(100)]
    for raw in open_ones:
        raw.sendall(half)
    assert daemon.run(command="echo still")["stdout"] == "still\n"
    for raw in open_ones:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
    assert daemon.call("GET", "/v1/health")[0] == 200


# the front alone, on real sockets


class Client:
    """A connection: bytes out, answers in."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data):
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def get(self, target, version="1.1"):
        await self.send(get(target, version))
        return await self.answer()

    async def answer(self):
        """Give the status and the body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
        body = await self.reader.readexactly(int(fields["Content-Length"])) if "Content-Length" in fields else b""
        return int(head.split()[1]), json.loads(body) if body else None

    async def rest(self):
        """Give what comes until the other side closes."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


def get(target="/", version="1.1", method="GET"):
    return f"{method} {target} HTTP/{version}\r\nHost: x\r\n\r\n".encode()


def post(body, length=None):
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body) if length is None else length,
        body,
    )


class Stage:
    """A front on a socket, and its clients."""

    def __init__(self, front, address):
        self.front, self.address, self.clients = front, address, []

    async def connect(self):
        if isinstance(self.address, str):
            self.clients.append(Client(*await asyncio.open_unix_connection(self.address)))
        else:
            self.clients.append(Client(*await asyncio.open_connection(*self.address)))
        return self.clients[-1]

    async def until(self, condition):
        """Let the loop turn until something has become so."""
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def on_stage(tmp_path):
    """Run a scene with a front that has the given handler."""

    def play(scene, handler, *, family=socket.AF_UNIX, admin=False):
        async def main():
            front = Front(handler)
            with socket.socket(family) as listener:
                path = str(tmp_path / "s")
                listener.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
                server = await front.listen(listener, admin=admin)
                stage = Stage(front, path if family == socket.AF_UNIX else listener.getsockname()[:2])
                try:
                    await asyncio.wait_for(scene(stage), HANG_S)
                finally:
                    server.close()
                    await front.close()
                    for client in stage.clients:
                        client.writer.close()
                await stage.until(lambda: not (front.connections or front.held or front.busy))

        asyncio.run(main())

    return play


async def echo(method, target, body, admin):
    return 200, {"method": method, "target": target, "body": len(body), "admin": admin}


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_pipelined_requests_are_answered_one_by_one_in_order(on_stage, family):
    inside = []

    async def handler(method, target, body, admin):
        assert not inside
        inside.append(target)
        await asyncio.sleep(0)
        inside.remove(target)
        return 200, target

    async def scene(stage):
        client = await stage.connect()
        await client.send(b"".join(get(f"/{number}") for number in range(50)))
        assert [await client.answer() for _ in range(50)] == [(200, f"/{number}") for number in range(50)]
        assert await client.get("/again") == (200, "/again")

    on_stage(scene, handler, family=family)


@pytest.mark.parametrize("admin", [False, True])
def test_the_handler_knows_the_socket(on_stage, admin):
    async def scene(stage):
        client = await stage.connect()
        assert await client.get("/") == (200, {"method": "GET", "target": "/", "body": 0, "admin": admin})

    on_stage(scene, echo, admin=admin)


def test_pipelining_without_end_is_not_buffered(on_stage):
    go = asyncio.Event()

    async def handler(*request):
        await go.wait()
        return 200, None

    async def scene(stage):
        client = await stage.connect()
        sending = asyncio.ensure_future(client.send(get() * 400_000))  # 14 MB
        await stage.until(lambda: stage.front.busy)
        await asyncio.wait([sending], timeout=0.2)  # what can come has come; if it is less, the test only sees less
        assert not sending.done()
        assert stage.front.held < 2 << 20
        go.set()
        for _ in range(1000):
            assert (await client.answer())[0] == 200
        client.writer.transport.abort()
        await asyncio.wait([sending])

    on_stage(scene, handler)


@pytest.mark.parametrize("start", [b"G", get()[:-2], post(b"{", 1_000_000)])
def test_who_is_slow_is_cut_off_however_much_drips(on_stage, monkeypatch, start):
    monkeypatch.setattr(http, "_PATIENCE_S", 0.1)

    async def scene(stage):
        client = await stage.connect()
        await client.send(start)
        end = asyncio.ensure_future(client.rest())
        while not end.done():
            await client.send(b"A")
            await asyncio.wait([end], timeout=0.02)
        assert await end == b""

    on_stage(scene, echo)


def test_who_does_not_take_an_answer_is_cut_off(on_stage, monkeypatch):
    monkeypatch.setattr(http, "_PATIENCE_S", 0.1)

    async def handler(method, target, body, admin):
        return 200, "x" * (8 << 20)

    async def scene(stage):
        await stage.connect()
        first = stage.clients[0]
        first.writer.transport.pause_reading()
        await first.send(get())
        await first.send(b"")
        second = await stage.connect()
        second.writer.transport.pause_reading()
        await second.send(get(version="1.0"))
        await stage.until(lambda: stage.front.busy)
        await stage.until(lambda: not stage.front.connections)

    on_stage(scene, handler)


@pytest.mark.parametrize("how", ["close", "abort", "half"])
def test_a_client_that_leaves_cancels_its_request(on_stage, how):
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(*request):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def scene(stage):
        client = await stage.connect()
        await client.send(get())
        await started.wait()
        transport = client.writer.transport
        {"close": transport.close, "abort": transport.abort, "half": transport.write_eof}[how]()
        await cancelled.wait()
        await stage.until(lambda: not stage.front.connections)

    on_stage(scene, handler, family=socket.AF_INET)


def test_work_that_somebody_cancels_is_told(on_stage):
    async def handler(*request):
        raise asyncio.CancelledError

    async def scene(stage):
        client = await stage.connect()
        for _ in range(2):
            status, answer = await client.get("/")
            assert (status, answer["error_code"]) == (499, "cancelled")

    on_stage(scene, handler)


def test_a_bug_of_a_handler_ends_its_connection_only(on_stage, caplog):
    async def handler(method, target, body, admin):
        if target == "/bug":
            raise ZeroDivisionError
        return 200, None

    async def scene(stage):
        broken, fine = await stage.connect(), await stage.connect()
        await broken.send(get("/bug") + get("/"))
        assert await broken.rest() == b""
        assert (await fine.get("/"))[0] == 200

    with caplog.at_level(logging.ERROR):
        on_stage(scene, handler)
    assert "event=bug" in caplog.text


async def three_lines(*request):
    async def lines():
        for number in range(3):
            yield {"line": number}

    return 200, lines()


def test_lines_are_sent_in_chunks_as_they_come(on_stage):
    turn = asyncio.Event()

    async def handler(*request):
        async def lines():
            yield "first"
            await turn.wait()
            yield "second"

        return 200, lines()

    async def scene(stage):
        client = await stage.connect()
        await client.send(get())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"application/x-ndjson" in head
        assert await client.reader.readexactly(len(b'8\r\n"first"\n\r\n')) == b'8\r\n"first"\n\r\n'
        turn.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b'9\r\n"second"\n\r\n0\r\n\r\n'
        await client.send(get())
        assert b"200" in await client.reader.readuntil(b"\r\n\r\n")

    on_stage(scene, handler)


def test_lines_to_an_old_client_end_with_the_connection(on_stage):
    async def scene(stage):
        client = await stage.connect()
        await client.send(get(version="1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert b"chunked" not in head
        assert body == b'{"line": 0}\n{"line": 1}\n{"line": 2}\n'

    on_stage(scene, three_lines)


def test_lines_end_when_nobody_listens(on_stage):
    closed = asyncio.Event()

    async def handler(*request):
        async def lines():
            try:
                while True:
                    yield "x" * 1000
                    await asyncio.sleep(0)
            finally:
                closed.set()

        return 200, lines()

    async def scene(stage):
        client = await stage.connect()
        await client.send(get())
        await client.reader.readexactly(5000)
        client.writer.transport.abort()
        await closed.wait()

    on_stage(scene, handler)


def test_the_answer_to_head_ends_the_connection(on_stage):
    async def scene(stage):
        client = await stage.connect()
        await client.send(get(method="HEAD") + get())
        assert (await client.rest()).count(b"HTTP/1.1 200") == 1

    on_stage(scene, echo)


def test_unused_connections_make_room_for_new_ones(on_stage):
    async def scene(stage):
        stage.front.most_connections = 5
        raws = [socket.socket(socket.AF_UNIX) for _ in range(60)]
        for raw in raws:  # all of them wait when the loop turns next
            raw.connect(stage.address)
        client = await stage.connect()
        assert (await client.get("/"))[0] == 200
        assert len(stage.front.connections) <= 5
        for raw in raws:
            raw.close()

    on_stage(scene, echo)


def test_no_room_is_told_while_all_connections_are_used(on_stage):
    go = asyncio.Event()

    async def handler(*request):
        await go.wait()
        return 200, None

    async def scene(stage):
        stage.front.most_connections = 3
        used = [await stage.connect() for _ in range(3)]
        for client in used:
            await client.send(get())
        await stage.until(lambda: stage.front.busy == 3)
        for _ in range(5):
            refused = await stage.connect()
            status, answer = await refused.answer()
            assert (status, answer["error_code"]) == (503, "at_capacity")
        assert len(stage.front.connections) <= 4
        go.set()
        assert [await client.answer() for client in used] == [(200, None)] * 3
        assert (await (await stage.connect()).get("/"))[0] == 200

    on_stage(scene, handler)


def test_bodies_that_are_held_are_bounded_over_all_connections(on_stage, monkeypatch):
    monkeypatch.setattr(http, "_MAX_HELD_BYTES", 200_000)

    async def scene(stage):
        first, second, small = await stage.connect(), await stage.connect(), await stage.connect()
        await first.send(post(b"a" * 150_000, 151_000))
        await stage.until(lambda: stage.front.held > 150_000)
        await second.send(post(b"a" * 150_000, 151_000))
        status, answer = await second.answer()
        assert (status, answer["error_code"]) == (503, "at_capacity")
        assert (await small.get("/"))[0] == 200
        second.writer.close()
        await stage.until(lambda: stage.front.held < 160_000)
        await first.send(b"a" * 1000)
        assert (await first.answer())[1]["body"] == 151_000
        await stage.until(lambda: stage.front.held == 0)

    on_stage(scene, echo)


def test_a_refusal_reaches_who_sends_all_before_reading(on_stage, monkeypatch):
    """Closed at once, the connection would break under the sender, who would never look at the answer."""
    monkeypatch.setattr(http, "_LINGER_S", HANG_S)

    async def scene(stage):
        client = await stage.connect()
        client.writer.write(post(b"a" * (8 << 20), 65 << 20))
        await client.writer.drain()
        await stage.until(lambda: not client.writer.transport.get_write_buffer_size())
        assert (await client.answer())[0] == 413

    on_stage(scene, echo, family=socket.AF_INET)


def test_closing_the_front_cuts_off_what_runs(on_stage):
    ended = []

    async def handler(*request):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scene(stage):
        for _ in range(3):
            await (await stage.connect()).send(get())
        await stage.until(lambda: stage.front.busy == 3)
        await stage.front.close()
        assert len(ended) == 3

    on_stage(scene, handler)


OUT_OF_DESCRIPTORS = """
import asyncio, os, resource, socket, sys
from collimate_ray.daemon.http import Front
hogged = []
async def handler(method, target, body, admin):
    if target == "/hog":
        try:
            while True:
                hogged.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    elif target == "/free":
        while hogged:
            os.close(hogged.pop())
    return 200, len(hogged)
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    await Front(handler).listen(listener)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


def test_it_recovers_from_having_no_descriptor_left(tmp_path):
    def ask(sock, target):
        sock.sendall(get(target))
        return sock.recv(65536)

    path = str(tmp_path / "s")
    with subprocess.Popen(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS, path], stdin=-1, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        with socket.socket(socket.AF_UNIX) as old, socket.socket(socket.AF_UNIX) as new:
            old.settimeout(HANG_S)
            new.settimeout(HANG_S)
            old.connect(path)
            assert int(ask(old, "/hog").split()[-1]) > 50  # as many as there were
            new.connect(path)
            new.sendall(get("/"))
            for _ in range(5):  # those who are in are served all the while
                assert ask(old, "/").startswith(b"HTTP/1.1 200")
            ask(old, "/free")
            assert new.recv(65536).startswith(b"HTTP/1.1 200")
        log = process.communicate("")[1]
        assert 1 <= log.count("Too many open files") < 100
    assert process.returncode == 0
