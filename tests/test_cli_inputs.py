"""Bad input of every kind: exit code 2, one line that names place, field, what was found and what was expected."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cli_tools import RIGHT, SPEC, row, write_lines

import collimate_ray
from collimate_ray.cli import main
from collimate_ray.cli.inputs import read_rows
from collimate_ray.spec import spec_from_dict
from collimate_ray.spec.parse import KINDS


def problems(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return [line.removeprefix("collimate-ray: error: ") for line in said.err.splitlines()]


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in row().items() if name != key}


BAD_LINES = {
    "not JSON": ("{oops}", "expected JSON, found a mistake at column 2"),
    "cut off": ('{"id": "a"', "expected JSON, found a mistake at column 11"),
    "a list": ("[1, 2]", "line: expected a JSON object, found [1, 2]"),
    "too deep": ("[" * 100_000, "expected JSON, found a value that cannot be read"),
    "no id": (without("id"), "id: expected this field, found only 'spec', 'completions'"),
    "no spec": (without("spec"), "spec: expected this field, found only 'id', 'completions'"),
    "no completions": (without("completions"), "completions: expected this field"),
    "nothing": ({}, "id: expected this field, found only nothing"),
    "unknown key": (row(completion="x"), "'completion': unknown field, expected only id, spec, completions"),
    "id a number": (row(id=7), "id: expected a string that is not empty, found 7"),
    "id empty": (row(id=""), "id: expected a string that is not empty, found ''"),
    "spec a string": (row(spec="unit_tests"), "spec: expected a JSON object, found 'unit_tests'"),
    "unknown kind": (row(spec={"kind": "vibes"}), "'vibes'"),
    "spec key": (row(spec={**SPEC, "colour": 1}), "colour"),
    "completions a string": (row(completions=RIGHT), "completions: expected a list of at least one string"),
    "completions empty": (
        row(completions=[]),
        "completions: expected a list of at least one string, found []",
    ),
    "a completion a number": (row(completions=["x", 17]), "completions[1]: expected a string, found 17"),
    "a completion null": (row(completions=[None]), "completions[0]: expected a string, found None"),
    "seed short": (row(seed="abc"), "seed: expected 64 hex characters, found 'abc'"),
    "seed a number": (row(seed=1), "seed: expected 64 hex characters, found 1"),
    "limits a list": (row(limits=[1]), "limits: expected an object of limits, found list"),
    "unknown limit": (row(limits={"seconds": 1}), "limits: unknown limit 'seconds'"),
    "limit zero": (row(limits={"time_s": 0}), "limits.time_s: expected a number above 0, found 0"),
    "limit NaN": (
        row(limits={"time_s": float("nan")}),
        "limits.time_s: expected a number above 0, found nan",
    ),
    "limit true": (row(limits={"time_s": True}), "limits.time_s: expected a number above 0, found True"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, expected = BAD_LINES[name]
    path = write_lines(tmp_path / "in.jsonl", row("fine"), "", line)
    [problem] = problems(capsys, "grade", path, "--out", tmp_path / "out.jsonl")
    assert problem.startswith(f"{path}:3: ")
    assert expected in problem
    assert len(problem) < len(str(path)) + 300
    assert not (tmp_path / "out.jsonl").exists()


def test_all_lines_are_checked_and_ten_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", *[row(str(at), seed="x") for at in range(13)])
    lines = problems(capsys, "grade", path, "--out", tmp_path / "out")
    assert len(lines) == 11
    assert lines[9].startswith(f"{path}:10: seed")
    assert lines[10] == "... and 3 more"


def test_an_id_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", row("a"), row("b"), row("a"))
    [problem] = problems(capsys, "grade", path, "--out", tmp_path / "out")
    assert problem == f"{path}:3: id: expected an id of its own, found 'a' a second time"


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b"\n \n")
    (tmp_path / "latin").write_bytes(b'{"id": "\xe9"}\n')
    (tmp_path / "torn.gz").write_bytes(gzip.compress(json.dumps(row()).encode())[:-9])
    expected = {
        "empty": "expected one JSON object a line, found no line",
        "blank": "expected one JSON object a line, found no line",
        "latin": "expected UTF-8, found byte 0xe9 at column 9",
        "torn.gz": "cannot be read: broken gzip data",
        "nowhere": "cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
    }
    for name, text in expected.items():
        [problem] = problems(capsys, "grade", tmp_path / name, "--out", tmp_path / "out")
        assert text in problem


def test_an_out_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", row())
    os.symlink(path, tmp_path / "link")
    expected = {
        "nowhere/out": "No such file or directory",
        ".": "Is a directory",
        "in.jsonl": "expected a file of its own",
        "link": "expected a file of its own",
    }
    for name, text in expected.items():
        [problem] = problems(capsys, "grade", path, "--out", tmp_path / name)
        assert problem.startswith("--out: expected a file")
        assert text in problem
    assert read_rows(str(path))[0].id == "a"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["grade", "x", "--out", "y", "--completions", "z"],
            "--completions: expected only with --format humaneval",
        ),
        (
            ["grade", "x", "--out", "y", "--format", "humaneval"],
            "--completions: expected 'reference' or a file",
        ),
        (["serve"], "expected either --socket PATH or --port N"),
        (["serve", "--socket", "x", "--port", "1"], "expected either --socket PATH or --port N"),
        (["serve", "--socket", "x", "--host", "h"], "--host: expected only with --port"),
    ],
)
def test_bad_options(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "COMMAND: expected a value, found nothing"),
        ("polish", "COMMAND: expected one of demo, grade, serve, doctor, found 'polish'"),
        ("grade", "INPUT, --out: expected a value, found nothing"),
        ("grade x", "--out: expected a value, found nothing"),
        ("grade x --out", "--out: expected a value, found nothing"),
        ("grade x --out y --nodes 0", "--nodes: expected a whole number from 1 to 64, found '0'"),
        ("grade x --out y --nodes many", "--nodes: expected a whole number from 1 to 64, found 'many'"),
        ("grade x --out y --slots -1", "--slots: expected a whole number from 1 to 1024, found '-1'"),
        ("grade x --out y --deadline-s nan", "--deadline-s: expected seconds above 0, found 'nan'"),
        (
            "grade x --out y --seeds lucky",
            "--seeds: expected one of vanilla, crn, deterministic, found 'lucky'",
        ),
        ("grade x --out y --nodes 2 --address auto", "--address: expected only without --nodes, found both"),
        ("grade x --out y --json=3", "--json: expected no value, found '3'"),
        ("grade x --out y --node 3", "--node: unknown option"),
        ("grade x --node 3 --out y", "--node: unknown option"),
        ("grade x y --out z", "y: unknown argument"),
        ("serve --port 70000", "--port: expected a whole number from 0 to 65535, found '70000'"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.split()
    program = " ".join(["collimate-ray", *words[:1]]) if words != ["polish"] else "collimate-ray"
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines() == [f"{program}: {expected}", f"see '{program} --help'"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"collimate-ray {collimate_ray.__version__}\n"


def test_a_humaneval_file_without_its_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "tasks", *[{"task_id": f"T/{at}", "prompt": ""} for at in range(3)])
    [problem] = problems(capsys, "grade", path, "--out", tmp_path / "out")
    assert problem == f"{path}:1: looks like HumanEval: add --format humaneval"


def test_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "nowhere.jsonl", "--out", str(tmp_path / "out"), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said == {"error": ["nowhere.jsonl: cannot be read: No such file or directory"], "exit_code": 2}


@pytest.mark.parametrize("name", ["demo", "grade", "serve", "doctor"])
def test_help_tells_examples_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"collimate-ray {name} " in text.partition("examples:")[2]
    assert "130  interrupted" in text
    assert "--json" in text
    assert "2    bad input or options; nothing was graded" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_help_shows_a_valid_spec_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "--help"]) == 0
    text = capsys.readouterr().out
    specs = re.findall(r"^  \{\"kind.*?\}$", text, re.MULTILINE | re.DOTALL)
    assert {spec_from_dict(json.loads(spec)).kind for spec in specs} == set(KINDS)
    for said in ('defaults to "all"', "GradeResult", "join by id", "keep the file from"):
        assert said in text


def test_good_rows(tmp_path: Path) -> None:
    seed = "0f" * 32
    path = tmp_path / "in.jsonl.gz"
    lines = [
        json.dumps(row("a", limits={"time_s": 2}, seed=seed)),
        "",
        json.dumps(row("b", completions=["\ud83d"])),
    ]
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    first, second = read_rows(str(path), template="other")
    assert (first.limits, first.seed, first.spec.template) == ({"time_s": 2}, seed, "other")
    assert (second.limits, second.seed, second.completions) == (None, None, ("\ud83d",))
