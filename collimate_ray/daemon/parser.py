"""HTTP/1.1 requests out of bytes, however those are cut: strict, bounded, sans-IO.

Must not read sockets or know routes. Source: RFC 9112, its MUSTs for servers; where it leaves a choice the stricter one
is taken: no bare line feed, no folded line, no second Content-Length, no Content-Length beside Transfer-Encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Largest header, bytes; also the largest trailer.
MAX_HEADER_BYTES = 64 << 10
#: Largest body, bytes: files and stdin of an exec.
MAX_BODY_BYTES = 64 << 20
#: Longest line with the size of a chunk, bytes: digits and an extension that nobody reads.
_MAX_CHUNK_LINE = 256

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_REQUEST_LINE = re.compile(rb"(%s{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])" % _TOKEN)
_NAME = re.compile(rb"%s+" % _TOKEN)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: What the beginning of a request line may be, as far as it came: TLS and other noise is answered at once.
_PROMISING = re.compile(rb"%s{1,32}(?: |\Z)" % _TOKEN)
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
#: Fields that mean something here, and whether one may come twice (as a list).
_KNOWN = {
    b"host": False,
    b"content-length": False,
    b"transfer-encoding": False,
    b"connection": True,
    b"expect": False,
    b"origin": False,
}


class Unfit(Exception):
    """The bytes are not a request that is served.

    Args:
        status: HTTP status of the answer.
        message: One line for people.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        method: As it came.
        target: As it came, ASCII.
        body: All of it.
        keep_alive: Whether the connection stays open after the answer; never for HTTP/1.0, nor for HEAD, whose answer
            would have to end before its body.
        chunks: Whether the client understands a chunked answer (HTTP/1.1).
    """

    method: str
    target: str
    body: bytes
    keep_alive: bool
    chunks: bool


@dataclass(frozen=True)
class _Head:
    method: str
    target: str
    keep_alive: bool
    is_new: bool
    chunked: bool
    length: int
    expects: bool


class Parser:
    """Takes bytes, gives requests. One for each connection.

    After ``Unfit`` it is of no more use: where the next request begins is not known.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        #: bytes of an unfinished header (or chunk line) that were searched for its end
        self._searched = 0
        self._head: _Head | None = None
        self._body = bytearray()
        self._told_to_continue = False

    @property
    def midway(self) -> bool:
        """Whether a request has begun and is not complete."""
        return self._head is not None or bool(self._buffer)

    @property
    def waiting(self) -> int:
        """Bytes that are held."""
        return len(self._buffer) + len(self._body)

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._buffer += data

    def next(self) -> Request | None:
        """Give the next request, or None: it is not complete.

        Raises:
            Unfit: What came is no request.
        """
        if self._head is None:
            self._head = self._take_head()
            if self._head is None:
                return None
        head = self._head
        body = self._take_chunks() if head.chunked else self._take_body(head.length)
        if body is None:
            return None
        self._head, self._told_to_continue = None, False
        return Request(head.method, head.target, body, head.keep_alive, head.is_new)

    def must_continue(self) -> bool:
        """Tell, once, that the client waits for "100 Continue" before it sends the body."""
        if self._head is None or not self._head.expects or self._told_to_continue or self._buffer or self._body:
            return False
        self._told_to_continue = True
        return True

    def _take_head(self) -> _Head | None:
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: old clients end a body with an empty line too many
            del self._buffer[:2]
            self._searched = 0
        text = self._take_until(b"\r\n\r\n", MAX_HEADER_BYTES, 431, "header")
        if text is not None:
            return _read_head(text)
        if self._buffer and self._buffer != b"\r" and not _PROMISING.match(self._buffer):
            raise Unfit(400, "not HTTP/1.1: expected a request line")
        return None

    def _take_until(self, end: bytes, most: int, status: int, what: str) -> bytes | None:
        """Take what stands before ``end``, and ``end``; None if that has not come."""
        at = self._buffer.find(end, max(0, self._searched - len(end) + 1), most + len(end))
        if at < 0:
            if len(self._buffer) >= most + len(end):
                raise Unfit(status, f"{what}: expected at most {most} bytes, found more")
            # it would never end
            if _BARE_LINE_FEED.search(self._buffer, self._searched):
                raise Unfit(400, f"not HTTP/1.1: {what}: expected lines that end in CR LF")
            self._searched = len(self._buffer)
            return None
        text = bytes(memoryview(self._buffer)[:at])
        del self._buffer[: at + len(end)]
        self._searched = 0
        return text

    def _take_body(self, length: int) -> bytes | None:
        if len(self._buffer) < length:
            return None
        if not length:
            return b""
        body = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        return body

    def _take_chunks(self) -> bytes | None:
        while True:
            found = self._peek_chunk_line()
            if found is None:
                return None
            size, begin = found
            if not size:
                return self._end_of_chunks(begin)
            if len(self._body) + size > MAX_BODY_BYTES:
                raise _too_large("more")
            if len(self._buffer) < begin + size + 2:
                return None
            if self._buffer[begin + size : begin + size + 2] != b"\r\n":
                raise Unfit(400, "not HTTP/1.1: chunk: expected CR LF at its end")
            self._body += memoryview(self._buffer)[begin : begin + size]
            del self._buffer[: begin + size + 2]

    def _peek_chunk_line(self) -> tuple[int, int] | None:
        """Give the size of the chunk that stands first, and where its data begins."""
        at = self._buffer.find(b"\r\n", 0, _MAX_CHUNK_LINE)
        line = bytes(self._buffer[: min(_MAX_CHUNK_LINE, len(self._buffer)) if at < 0 else at])
        if at < 0 and len(self._buffer) < _MAX_CHUNK_LINE and b"\n" not in line:
            return None
        found = _CHUNK_LINE.fullmatch(line) if at >= 0 else None
        if found is None:
            raise Unfit(400, "not HTTP/1.1: chunk: expected its size in hexadecimal digits")
        return int(found[1], 16), at + 2

    def _end_of_chunks(self, begin: int) -> bytes | None:
        """Take the last chunk and the trailer, which is checked and not read."""
        if self._buffer[begin : begin + 2] == b"\r\n":
            del self._buffer[: begin + 2]
        else:
            text = self._take_until(b"\r\n\r\n", MAX_HEADER_BYTES, 431, "trailer")
            if text is None:
                return None
            _read_fields(text.split(b"\r\n")[1:])
        self._searched = 0
        body = bytes(self._body)
        self._body = bytearray()
        return body


def _read_head(text: bytes) -> _Head:
    line, *rest = text.split(b"\r\n")
    start = _REQUEST_LINE.fullmatch(line)
    if start is None:
        raise Unfit(400, f"not HTTP/1.1: expected a request line, found {line[:80]!r}")
    fields = _read_fields(rest)
    is_new = start[3] == b"1"
    if is_new and b"host" not in fields:
        raise Unfit(400, "not HTTP/1.1: Host: expected one, found none")
    if b"origin" in fields:
        raise Unfit(400, "Origin: expected none: pages in a browser must not drive this daemon")
    wishes = {wish.strip().lower() for wish in fields.get(b"connection", b"").split(b",")}
    return _Head(
        method=start[1].decode("ascii"),
        target=start[2].decode("ascii"),
        keep_alive=is_new and b"close" not in wishes and start[1] != b"HEAD",
        is_new=is_new,
        chunked=_is_chunked(fields, is_new),
        length=_length(fields.get(b"content-length")),
        expects=_expects(fields.get(b"expect"), is_new),
    )


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in lines:
        # no single pattern for all of it: with blanks inside and at both ends that would take quadratic time
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise Unfit(400, f"not HTTP/1.1: expected a header field, found {line[:80]!r}")
        name, value = name.lower(), value.strip(b" \t")
        if name not in _KNOWN:
            continue
        if name not in fields:
            fields[name] = value
        elif _KNOWN[name]:
            fields[name] += b"," + value
        else:
            raise Unfit(400, f"not HTTP/1.1: {name.decode().title()}: expected one, found two")
    return fields


def _is_chunked(fields: dict[bytes, bytes], is_new: bool) -> bool:
    coding = fields.get(b"transfer-encoding")
    if coding is None:
        return False
    if b"content-length" in fields or not is_new:
        raise Unfit(400, "not HTTP/1.1: Transfer-Encoding: expected none beside Content-Length, and none in HTTP/1.0")
    if coding.lower() != b"chunked":
        raise Unfit(501, f"Transfer-Encoding: expected chunked, found {coding[:80]!r}")
    return True


def _length(value: bytes | None) -> int:
    if value is None:
        return 0
    if not value.isdigit():
        raise Unfit(400, f"not HTTP/1.1: Content-Length: expected digits, found {value[:20]!r}")
    # more than twelve digits are too many whatever they say, and int() balks at thousands
    if len(value) > 12 or int(value) > MAX_BODY_BYTES:
        raise _too_large(value[:20].decode("ascii"))
    return int(value)


def _expects(value: bytes | None, is_new: bool) -> bool:
    if value is None or not is_new:  # RFC 9110, 10.1.1: in HTTP/1.0 it means nothing
        return False
    if value.lower() != b"100-continue":
        raise Unfit(417, f"Expect: expected 100-continue, found {value[:80]!r}")
    return True


def _too_large(found: str) -> Unfit:
    return Unfit(413, f"body: expected at most {MAX_BODY_BYTES} bytes, found {found}")
