"""Counting, tables, the output file, and standard output that goes away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import read_lines

from collimate_ray.cli.errors import InputError, OutputLost
from collimate_ray.cli.output import OutFile, group_record
from collimate_ray.cli.report import Tally, percentile, render
from collimate_ray.results import GradeResult, GroupResult, Verdict, infra_failure


def graded(reward: float, node: str, ms: float) -> GradeResult:
    verdict = Verdict.PASSED if reward == 1.0 else Verdict.FAILED
    return GradeResult(reward, verdict=verdict, node_id=node, exec_time_ms=ms, evidence={"early_exit": 1})


def tally() -> Tally:
    counted = Tally(seconds=2.0)
    counted.add([graded(1.0, "n1", 10.0), graded(0.5, "n2", 30.0)])
    counted.add([graded(0.0, "n2", 20.0), infra_failure("Poison")])
    return counted


def test_a_summary_counts_everything() -> None:
    summary = tally().summary()
    assert (summary["groups"], summary["grades"], summary["grades_per_s"]) == (2, 4, 2.0)
    assert summary["verdicts"] == {"passed": 1, "failed": 2}
    assert summary["infra_errors"] == {"Poison": 1}
    assert summary["evidence"] == {"early_exit": 3}
    assert summary["reward_mean"] == 0.5
    assert summary["nodes"]["n2"] == {"grades": 2, "passed": 0, "p50_ms": 30.0, "p99_ms": 30.0}
    assert (summary["p50_ms"], summary["p99_ms"]) == (20.0, 30.0)
    json.dumps(summary)


def test_nothing_counted() -> None:
    summary = Tally().summary()
    assert (summary["reward_mean"], summary["grades_per_s"], summary["p99_ms"]) == (None, 0.0, None)
    assert percentile([5.0], 0.99) == 5.0


def test_the_tables_tell_verdicts_nodes_speed_and_place() -> None:
    text = render(tally(), "/some/where/out.jsonl")
    for part in (
        "PASSED",
        "no verdict: Poison",
        "25.0%",
        "n2",
        "2.0 grades/s",
        "p99 30 ms",
        "infra errors: 1",
    ):
        assert part in text
    assert text.endswith("results: /some/where/out.jsonl")


def test_a_line_has_the_whole_group_in_order(tmp_path: Path) -> None:
    out = OutFile(str(tmp_path / "out"))
    out.begin()
    results = [graded(1 / 3, "n1", 1.0), infra_failure("NodeLost", seed="0" * 64)]
    out.write(group_record("g/\ud83d", GroupResult.of("x", results)))
    out.close()
    [line] = read_lines(tmp_path / "out")
    assert (line["id"], line["rewards"], line["valid"]) == ("g/\ud83d", [1 / 3, 0.0], [True, False])
    assert [result["reward"] for result in line["results"]] == [1 / 3, None]
    assert [result["error"] for result in line["results"]] == [None, "NodeLost"]


def test_what_out_held_stays_until_grading_starts(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("precious\n")
    for path in (old, new):
        OutFile(str(path)).close()
    assert old.read_text() == "precious\n"
    assert not new.exists()
    again = OutFile(str(old))
    again.begin()
    again.close()
    assert old.read_text() == ""


def test_a_full_disk_is_told() -> None:
    out = OutFile("/dev/full")
    out.begin()
    with pytest.raises(OutputLost, match="cannot write /dev/full: No space left on device"):
        out.write({"id": "a"})
    out.close()


def test_many_problems_are_cut() -> None:
    assert str(InputError(map(str, range(12)))).splitlines()[-1] == "... and 2 more"


def test_a_reader_of_standard_output_may_go_away() -> None:
    program = "from collimate_ray.cli.output import emit\nfor _ in range(3): emit('x' * 100_000)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
