"""The HTTP front against clients that do not keep to HTTP, or to manners."""

import json
import socket

import pytest
from daemon_harness import Daemon


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
