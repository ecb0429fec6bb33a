"""The report of the in-session program: finding it in an exec's output, and its shape.

The output is the candidate's as much as the keeper's, so a line counts only if it carries the request's nonce, which
no process of the candidate's has held.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collimate_ray.values import ValueCrossingError, loads

#: What a report's line begins with (the runner's ``REPORT_MARK``).
REPORT_MARK = "collimate-report"

#: Largest report, bytes once unpacked: all answers of a request (32 MiB) with room for their wrapping.
MAX_REPORT_BYTES = 96 << 20


class ReportMissing(Exception):
    """The output holds no report of this request: the session died."""


@dataclass(frozen=True)
class CaseRecord:
    """What happened in one case.

    Attributes:
        status: ok, fail, exc, exit, signal, timeout, memory, output, garbled, no_entry or prelude.
        value: The encoded answer of a call.
        out: What a program wrote, bytes.
        exc: Builtin type, own type and text of an exception, or ().
        cpu_ms: CPU time, ms.
        wall_ms: Wall time, ms.
    """

    status: str
    value: Any = None
    out: bytes = b""
    exc: tuple[str, ...] = ()
    cpu_ms: float = 0.0
    wall_ms: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> CaseRecord:
        """Read a record of the report."""
        return cls(
            status=str(data["s"]),
            value=data.get("v"),
            out=base64.b64decode(data.get("out", "")),
            exc=tuple(str(part) for part in data.get("exc", ())),
            cpu_ms=float(data.get("cpu_ms", 0.0)),
            wall_ms=float(data.get("wall_ms", 0.0)),
        )


@dataclass(frozen=True)
class Report:
    """What the in-session program reports.

    Attributes:
        load: How loading the candidate went; every case shares it where it is not ok.
        cases: Records in the order of the cases; fewer where grading stopped early.
        evidence: Counters of attempts to forge.
        rss_kib: Peak resident memory, KiB.
        spec_error: What is wrong with the spec's own code, or "".
        refused: Why the program would not run here, or "".
    """

    load: CaseRecord = field(default_factory=lambda: CaseRecord("ok"))
    cases: tuple[CaseRecord, ...] = ()
    evidence: Mapping[str, int] = field(default_factory=dict)
    rss_kib: int = 0
    spec_error: str = ""
    refused: str = ""


def read_report(stdout: str, nonce: str) -> Report:
    """Find and read the report in an exec's output.

    Args:
        stdout: The exec's merged output.
        nonce: The request's nonce.

    Raises:
        ReportMissing: There is none, or it is broken.
    """
    marked = [line.split(" ") for line in stdout.split("\n") if line.startswith(REPORT_MARK)]
    signed = [words for words in marked if len(words) == 3 and words[1] == nonce]
    if len(signed) != 1:
        raise ReportMissing(f"{len(signed)} reports in {len(stdout)} characters of output")
    try:
        report = _read(loads(_unpack(signed[0][2])))
    except (binascii.Error, zlib.error, ValueCrossingError, UnicodeDecodeError) as error:
        raise ReportMissing(f"a report that is not readable: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportMissing(f"a report of another shape: {error}") from None
    forged = len(marked) - 1
    return _with_evidence(report, "forged_report", forged) if forged else report


def _unpack(body: str) -> str:
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(body, validate=True), MAX_REPORT_BYTES)
    if not inflate.eof:
        raise zlib.error("cut short, or over 96 MiB")
    return data.decode("ascii")


def _read(data: Any) -> Report:
    return Report(
        load=CaseRecord.of(data.get("load", {"s": "ok"})),
        cases=tuple(CaseRecord.of(record) for record in data.get("cases", ())),
        evidence={str(kind): int(times) for kind, times in data.get("evidence", {}).items()},
        rss_kib=int(data.get("rss_kib", 0)),
        spec_error=str(data.get("spec_error", "")),
        refused=str(data.get("refused", "")),
    )


def _with_evidence(report: Report, kind: str, times: int) -> Report:
    evidence = {**report.evidence, kind: report.evidence.get(kind, 0) + times}
    return Report(report.load, report.cases, evidence, report.rss_kib, report.spec_error, report.refused)
