"""The daemon's HTTP/1.1 parser: any cut of the bytes, noise and mutations, and h11 as a second opinion."""

import contextlib
import itertools
import tracemalloc

import h11
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from collimate_ray.daemon import parser as module
from collimate_ray.daemon.parser import MAX_BODY_BYTES, MAX_HEADER_BYTES, Parser, Request, Unfit

HOST = b"Host: x\r\n"


def parse(*pieces):
    """Give the requests, then the status of the refusal if there was one."""
    parser, found = Parser(), []
    for piece in pieces:
        parser.feed(piece)
        try:
            while (request := parser.next()) is not None:
                found.append(request)
        except Unfit as unfit:
            return found, unfit.status
    return found, None


def status_of(*pieces):
    return parse(*pieces)[1]


def body_of(*pieces):
    found, status = parse(*pieces)
    assert status is None
    (request,) = found
    return request.body


def post(*fields, body=b"", version=b"1.1"):
    lines = [b"POST /v1/exec HTTP/" + version, b"Host: x", *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunks(*parts, end=b"0\r\n\r\n"):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


# whole requests, however they are cut

bodies = st.binary(max_size=300)
cuts = st.lists(st.integers(0, 3000), max_size=12)


@st.composite
def requests(draw):
    """Give a request's bytes and what must come out."""
    method = draw(st.sampled_from(["GET", "POST", "DELETE", "HEAD", "M-SEARCH"]))
    target = draw(st.sampled_from(["/", "/v1/health", "/v1/sessions/a%20b?c=d", "*", "http://x/y"]))
    version = draw(st.sampled_from([0, 1]))
    body = draw(bodies)
    fields = [b"hOsT:x", b"X-Any: \xe4 \t ", b"X-Empty:"]
    close = draw(st.booleans())
    fields += [draw(st.sampled_from([b"Connection: close", b"connection:\tfoo, CLOSE "]))] if close else []
    if version == 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:at], body[at:]) if part]
        end = draw(st.sampled_from([b"0\r\n\r\n", b"000\r\nX-Trailer: y\r\nZ: \r\n\r\n", b'0;ext="a b"\r\n\r\n']))
        fields.append(draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:Chunked"])))
        sent = chunks(*parts, end=end)
    else:
        sent = body
        fields += [b"Content-Length: %d" % len(body)] if body or draw(st.booleans()) else []
    head = b"%b %b HTTP/1.%d" % (method.encode(), target.encode(), version)
    data = b"\r\n".join([head, *draw(st.permutations(fields))]) + b"\r\n\r\n" + sent
    empty = draw(st.sampled_from([b"", b"", b"\r\n", b"\r\n\r\n"]))
    expected = Request(method, target, body, version == 1 and not close and method != "HEAD", version == 1)
    return empty + data, expected


def pieces(data, cuts):
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.lists(requests(), min_size=1, max_size=4), cuts)
def test_pipelined_requests_come_out_however_they_are_cut(several, cuts):
    data = b"".join(data for data, _ in several)
    expected = [request for _, request in several]
    assert parse(*pieces(data, cuts)) == (expected, None)


@given(requests())
@settings(max_examples=30)
def test_byte_by_byte(one):
    data, expected = one
    parser = Parser()
    for at in range(len(data)):
        parser.feed(data[at : at + 1])
        request = parser.next()
        if at == len(data) - 1:
            assert request == expected
            assert not parser.midway
            assert parser.waiting == 0
        else:
            assert request is None
            assert parser.waiting <= at + 1


several = st.lists(requests().map(lambda one: one[0]), min_size=1, max_size=3)


# what is no request


@given(st.binary(max_size=400), cuts)
def test_noise_is_refused_or_waited_for(data, cuts):
    parse(*pieces(data, cuts))


SPICE = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"-1", b"\xff", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0",
    b"Content-Length: 3\r\n", b"Content-Length: 5\r\n", b"Expect: 100-continue\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n",
    b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffff\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


@st.composite
def mutated(draw):
    data = b"".join(draw(several))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        drop = draw(st.integers(0, 5))
        data = data[:at] + draw(st.sampled_from([b"", *SPICE]) | st.binary(max_size=3)) + data[at + drop :]
    return data


@given(mutated(), cuts)
@settings(max_examples=400)
def test_the_cuts_never_matter(data, cuts):
    assert parse(*pieces(data, cuts)) == parse(data)


def by_h11(data):
    """Give (method, target, body) of each request that h11 accepts, until it refuses one or the bytes end."""
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    with contextlib.suppress(h11.RemoteProtocolError):
        request, body = None, b""
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((request.method.decode(), request.target.decode(), body))
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            else:
                break
    return found


@given(mutated() | several.map(b"".join))
@settings(max_examples=400)
def test_what_h11_accepts_too_it_reads_alike(data):
    ours = [(request.method, request.target, request.body) for request in parse(data)[0]]
    theirs = by_h11(data)
    for mine, other in zip(ours, theirs, strict=False):
        assert mine == other


@given(requests())
def test_h11_accepts_what_we_call_whole(one):
    data, expected = one
    assume(expected.chunks)
    data = data.lstrip(b"\r\n")
    assert by_h11(data) == [(expected.method, expected.target, expected.body)]


@pytest.mark.parametrize(
    ("status", "data"),
    {
        "nonsense": (400, b"garbage\r\n\r\n"),
        "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        "HTTP/0.9": (400, b"GET /\r\n\r\n"),
        "HTTP/1.2": (400, b"GET / HTTP/1.2\r\n" + HOST + b"\r\n"),
        "lower-case version": (400, b"GET / http/1.1\r\n" + HOST + b"\r\n"),
        "two blanks": (400, b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n"),
        "a blank in the target": (400, b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n"),
        "a target beyond ASCII": (400, b"GET /\xe4 HTTP/1.1\r\n" + HOST + b"\r\n"),
        "a long method": (400, b"A" * 33 + b" / HTTP/1.1\r\n" + HOST + b"\r\n"),
        "a method without end": (400, b"A" * 33),
        "no Host": (400, b"GET / HTTP/1.1\r\n\r\n"),
        "two Hosts": (400, b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n"),
        "Origin": (400, post(b"Origin: null")),
        "bare line feeds": (400, b"GET / HTTP/1.1\nHost: x\n\n"),
        "one bare line feed": (400, b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n"),
        "a bare carriage return": (400, post(b"A: b\rC: d")),
        "a zero": (400, post(b"A: b\0c")),
        "a folded line": (400, post(b"A: b", b" c")),
        "a first line that is folded": (400, b"GET / HTTP/1.1\r\n Host: x\r\n\r\n"),
        "no colon": (400, post(b"bad header")),
        "no name": (400, post(b": x")),
        "a blank before the colon": (400, post(b"Content-Length : 3", body=b"abc")),
        "two lengths": (400, post(b"Content-Length: 3", b"Content-Length: 4", body=b"abcd")),
        "the same length twice": (400, post(b"Content-Length: 3", b"content-length: 3", body=b"abc")),
        "a list of lengths": (400, post(b"Content-Length: 3, 3", body=b"abc")),
        "a negative length": (400, post(b"Content-Length: -1")),
        "a length with a sign": (400, post(b"Content-Length: +3", body=b"abc")),
        "a length in hexadecimal": (400, post(b"Content-Length: 0x3", body=b"abc")),
        "a length with an underscore": (400, post(b"Content-Length: 1_0")),
        "an empty length": (400, post(b"Content-Length:")),
        "digits of elsewhere": (400, post("Content-Length: ٣".encode())),
        "a length over the cap": (413, post(b"Content-Length: %d" % (MAX_BODY_BYTES + 1))),
        "a length without end": (413, post(b"Content-Length: " + b"9" * 5000)),
        "length and chunks": (400, post(b"Content-Length: 3", b"Transfer-Encoding: chunked", body=chunks(b"abc"))),
        "chunks and length": (400, post(b"Transfer-Encoding: chunked", b"Content-Length: 3", body=chunks(b"abc"))),
        "chunks twice": (400, post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=chunks(b"a"))),
        "chunks in HTTP/1.0": (400, post(b"Transfer-Encoding: chunked", body=chunks(b"a"), version=b"1.0")),
        "a coding before": (501, post(b"Transfer-Encoding: gzip, chunked", body=chunks(b"a"))),
        "a coding that is not chunked": (501, post(b"Transfer-Encoding: identity")),
        "chunked, almost": (501, post(b"Transfer-Encoding: xchunked", body=chunks(b"a"))),
        "a strange expectation": (417, post(b"Expect: 200-ok", b"Content-Length: 3")),
        "two expectations": (400, post(b"Expect: 100-continue", b"Expect: 100-continue")),
    }.values(),
)  # fmt: skip
def test_refusals(status, data):
    assert parse(data) == ([], status)
    assert parse(*(data[at : at + 1] for at in range(len(data)))) == ([], status)


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n", b"\r\n", b"-3\r\nabc\r\n", b"+3\r\nabc\r\n", b"0x3\r\nabc\r\n", b" 3\r\nabc\r\n", b"3\nabc\r\n",
        b"3\r\nabcd\r\n", b"3\r\nabc\n0\r\n\r\n", b"3\r\nabcX\n", b"123456789\r\n", b"3;a\rb\r\nabc\r\n",
        b"3;a\0\r\nabc\r\n", b"0\r\nA: b\n\r\n\r\n",
        b"3;" + b"a" * 300, b"3" * 300, b"3\r\nabc\r\n0\r\nno colon\r\n\r\n", b"0\r\n folded: x\r\n\r\n",
        b"0\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    ],
)  # fmt: skip
def test_wrong_chunks(body):
    data = post(b"Transfer-Encoding: chunked", body=body)
    assert parse(data) == ([], 400)
    assert parse(*(data[at : at + 1] for at in range(len(data)))) == ([], 400)


def test_right_chunks():
    fields = b"Transfer-Encoding: chunked"
    assert body_of(post(fields, body=b"0\r\n\r\n")) == b""
    assert body_of(post(fields, body=b'A ; x="y"\r\n0123456789\r\n00000\r\n\r\n')) == b"0123456789"
    assert body_of(post(fields, body=chunks(b"0\r\n", b"\r\n\r\n"))) == b"0\r\n\r\n\r\n"
    assert body_of(post(fields, body=chunks(b"a", end=b"0\r\nContent-Length: 9\r\nHost: y\r\n\r\n"))) == b"a"


def test_headers_up_to_the_cap():
    start = b"GET / HTTP/1.1\r\nHost: x\r\nA: "
    fits = start + b"a" * (MAX_HEADER_BYTES - len(start))
    assert len(parse(fits + b"\r\n\r\n")[0]) == 1
    assert status_of(fits + b"a\r\n\r\n") == 431
    assert status_of(fits + b"aaaa") == 431
    assert status_of(b"GET /" + b"a" * (2 * MAX_HEADER_BYTES)) == 431


def test_trailers_up_to_the_cap():
    start = post(b"Transfer-Encoding: chunked", body=b"0\r\nA: ")
    assert status_of(start, b"a" * (2 * MAX_HEADER_BYTES)) == 431
    assert len(parse(start, b"a" * (MAX_HEADER_BYTES // 2), b"\r\n\r\n")[0]) == 1


def test_chunks_up_to_the_cap(monkeypatch):
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    head = post(b"Transfer-Encoding: chunked")
    assert body_of(head, chunks(b"a" * 600, b"b" * 400)) == b"a" * 600 + b"b" * 400
    assert status_of(head, chunks(b"a" * 600, b"b" * 401)) == 413
    assert status_of(head, b"3e9\r\n") == 413  # before any of it came
    assert status_of(head, b"ffffffff\r\n") == 413


def test_memory_is_bounded():
    """Whoever sends without end is refused before much of it is held."""
    for start, more in (
        (b"GET /", b"a" * 8192),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 1000),
        (b"", b"\r\n" * 4096),
        (post(b"Transfer-Encoding: chunked"), b"1;" + b"a" * 8192),
        (post(b"Transfer-Encoding: chunked", body=b"0\r\n"), b"A: b\r\n" * 1000),
    ):
        tracemalloc.start()
        parser = Parser()
        parser.feed(start)
        for _ in range(200):
            parser.feed(more)
            try:
                assert parser.next() is None
            except Unfit:
                break
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 4 * MAX_HEADER_BYTES
        assert peak < 16 * MAX_HEADER_BYTES


def test_old_clients():
    found, status = parse(b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert status is None
    assert [(request.keep_alive, request.chunks) for request in found] == [(False, False)] * 2


def test_who_waits_for_continue_is_told_once():
    parser = Parser()
    parser.feed(post(b"Expect: 100-Continue", b"Content-Length: 3"))
    assert parser.next() is None
    assert parser.must_continue()
    assert not parser.must_continue()
    parser.feed(b"abc" + post(b"Expect: 100-continue", b"Content-Length: 3") + b"d")
    assert parser.next().body == b"abc"
    assert parser.next() is None
    assert not parser.must_continue()  # it did not wait
    parser.feed(b"ef" + post(b"Expect: 100-continue", b"Content-Length: 3", version=b"1.0"))
    assert parser.next().body == b"def"
    assert parser.next() is None
    assert not parser.must_continue()  # in HTTP/1.0 it means nothing


def test_long_lines_of_blanks_take_no_quadratic_time():
    fields = [b"A:" + b" \t" * 30_000 + b"x"]
    assert len(parse(post(*fields))[0]) == 1
    assert status_of(post(b"A " + b" \t" * 30_000 + b"x")) == 400
