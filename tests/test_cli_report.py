"""Counting, tables, the output file, and standard output that goes away."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tools import PATIENCE_S, command, read_lines, write_lines

from collimate_ray.cli.errors import InputError, OutputLost
from collimate_ray.cli.output import OutFile, group_record
from collimate_ray.cli.progress import progress
from collimate_ray.cli.report import Tally, percentile, render
from collimate_ray.cli.run import note_errors
from collimate_ray.results import GradeResult, GroupResult, Verdict, infra_failure


def graded(reward: float, node: str, ms: float) -> GradeResult:
    verdict = Verdict.PASSED if reward == 1.0 else Verdict.FAILED
    return GradeResult(reward, verdict=verdict, node_id=node, exec_time_ms=ms, evidence={"early_exit": 1})


def tally() -> Tally:
    counted = Tally(seconds=2.0)
    counted.add([graded(1.0, "n1", 10.0), graded(0.5, "n2", 30.0)])
    counted.add([graded(0.0, "n2", 20.0), infra_failure("Poison")])
    counted.add([infra_failure("CheckerError")] * 2)
    return counted


def test_a_summary_counts_everything() -> None:
    summary = tally().summary()
    assert (summary["groups"], summary["grades"], summary["grades_per_s"]) == (3, 6, 3.0)
    assert summary["verdicts"] == {"passed": 1, "failed": 2}
    assert (summary["infra_errors"], summary["spec_errors"]) == ({"Poison": 1}, {"CheckerError": 2})
    assert tally().without_verdict == 3
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
        "no verdict: CheckerError",
        "33.3%",
        "n2",
        "3.0 grades/s",
        "p99 30 ms",
        "infra errors: 1",
        "spec errors: 2",
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


def test_lines_end_with_one_for_all_grades(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(164, bar=True) as lines:
        lines.update(80)
        lines.update(164)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("collimate-ray: graded 164 of 164, ")
    with progress(164, bar=False) as lines:  # stopped early
        lines.update(80)
    assert capsys.readouterr().err == ""


def test_a_note_says_why_there_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    results = [graded(1.0, "n1", 1.0), infra_failure("NodeLost"), infra_failure("NodeLost"), infra_failure("Poison")]
    note_errors("g", GroupResult.of("x", results))
    note_errors("h", GroupResult.of("y", results[:1]))
    assert capsys.readouterr().err == "collimate-ray: 'g': no verdict for 3 of 4: NodeLost, Poison\n"


def exit_code(arguments: list[str], *, out: int | None, err: int | None) -> int:
    return subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False).returncode


@pytest.fixture
def gone() -> Iterator[int]:
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


BAD = ["grade", "nowhere.jsonl", "--out", "x"]


@pytest.mark.parametrize(
    ("arguments", "code"), [(BAD, 2), ([*BAD, "--json"], 2), ([*BAD, "--seeds", "foo"], 2), (["grade", "--help"], 0)]
)
def test_a_reader_that_goes_away_changes_no_exit_code(arguments: list[str], code: int, gone: int) -> None:
    assert exit_code(command(*arguments), out=gone, err=gone) == code
    closed = "exec " + shlex.join(command(*arguments)) + " >&- 2>&- <&-"
    assert exit_code(["sh", "-c", closed], out=None, err=None) == code


def test_head_reads_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", *["{}"] * 20)
    line = shlex.join(command("grade", path, "--out", tmp_path / "out"))
    shell = ["bash", "-c", f'{line} 2>&1 | head -1; exit "${{PIPESTATUS[0]}}"']
    assert exit_code(shell, out=subprocess.DEVNULL, err=subprocess.DEVNULL) == 2


def test_an_interrupt_keeps_its_exit_code_without_a_reader(tmp_path: Path, gone: int) -> None:
    fifo = tmp_path / "in"
    os.mkfifo(fifo)
    line = command("grade", fifo, "--out", tmp_path / "out")
    with subprocess.Popen(line, stdout=gone, stderr=gone) as process, fifo.open("w"):  # it is reading now
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 130


def test_standard_output_that_is_full_is_told() -> None:
    program = "from collimate_ray.cli.streams import emit\nfor _ in range(2): emit('x' * 100_000)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=True
        )
    assert done.stderr == "collimate-ray: cannot write to standard output: No space left on device\n"
