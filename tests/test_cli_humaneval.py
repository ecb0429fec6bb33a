"""HumanEval's format: how a completion becomes a candidate, and what the prelude is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import write_lines

from collimate_ray.cli import main
from collimate_ray.cli.humaneval import candidate_code, fenced, humaneval_rows, prelude_of
from collimate_ray.cli.inputs import Problem
from collimate_ray.extract import extract_code

PRELUDE = "import math\n\ndef helper(x):\n    return x\n\n"
PROMPT = PRELUDE + '@staticmethod\ndef twice(x: int) -> int:\n    """Double it."""\n'
WHOLE = "def twice(x):\n    return 2 * x\n"


def task(**changed: Any) -> dict[str, Any]:
    test = "def check(candidate):\n    assert candidate(2) == 4\n"
    body = "    return x * 2\n"
    known = {
        "task_id": "T/0",
        "prompt": PROMPT,
        "entry_point": "twice",
        "canonical_solution": body,
        "test": test,
    }
    return {**known, **changed}


def test_the_prelude_is_the_prompt_without_its_last_function() -> None:
    assert prelude_of(PROMPT) == PRELUDE
    assert prelude_of("def f():\n    # no body yet\n") == ""
    with pytest.raises(Problem, match="prompt: expected Python that ends in a function"):
        prelude_of("x = 1\n")


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("    return x + x\n", PROMPT + "    return x + x\n"),
        (WHOLE, WHOLE.strip("\n")),
        (f"Sure:\n```python\n{WHOLE}```\n", WHOLE.strip("\n")),
        ("```python\n    return x + x\n```", PROMPT + "    return x + x"),
        (
            '    """```python\n    old\n    ```"""\n    return x',
            PROMPT + '    """```python\n    old\n    ```"""\n    return x',
        ),
        ("", PROMPT),
        ("    return (x\n", PROMPT + "    return (x\n"),
        ("    return x\n\ndef other():\n    pass\n", PROMPT + "    return x\n\ndef other():\n    pass\n"),
    ],
)
def test_a_completion_becomes_a_candidate(completion: str, code: str) -> None:
    assert candidate_code(completion, PROMPT, "twice") == code


@pytest.mark.parametrize(
    "code", ["def twice(x):\n    return '''\n```\n````\n`````'''", PROMPT + "    return x\n\n", "def twice(x"]
)
def test_extraction_gives_the_fenced_code_back(code: str) -> None:
    assert extract_code(fenced(code), "twice") == code


def test_lines_of_one_task_form_its_group(tmp_path: Path) -> None:
    tasks = write_lines(tmp_path / "tasks", task(), task(task_id="T/1"), task(task_id="T/2"))
    lines = [{"task_id": name, "completion": text} for name, text in (("T/1", "a"), ("T/0", "b"), ("T/1", "c"))]
    rows, left_out = humaneval_rows(str(tasks), str(write_lines(tmp_path / "samples", *lines)))
    assert [(row.id, len(row.completions)) for row in rows] == [("T/0", 1), ("T/1", 2)]
    assert left_out == ["T/2"]


BAD_FILES = {
    "no prompt": ([{"task_id": "T/0"}], [], "tasks:1: prompt: expected this field"),
    "prompt a number": ([task(prompt=5)], [], "tasks:1: prompt: expected a string, found 5"),
    "no function": ([task(prompt="x = 1\n")], [], "tasks:1: prompt: expected Python that ends in a function"),
    "entry": (
        [task(entry_point="a b")],
        [],
        "tasks:1: entry_point: expected the name of a function, found 'a b'",
    ),
    "twice": (
        [task(), task()],
        [],
        "tasks:2: task_id: expected a task of its own, found 'T/0' a second time",
    ),
    "no completion": ([task()], [{"task_id": "T/0"}], "samples:1: completion: expected this field"),
    "not text": (
        [task()],
        [{"task_id": "T/0", "completion": 1}],
        "samples:1: completion: expected a string, found 1",
    ),
    "unknown": ([task()], [{"task_id": "T/9", "completion": ""}], "task_id: expected tasks of"),
    "nothing": ([task()], [], "samples: expected one JSON object a line, found no line"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, samples, expected = BAD_FILES[name]
    files = write_lines(tmp_path / "tasks", *tasks), write_lines(tmp_path / "samples", *samples)
    arguments = [
        "grade",
        "--format",
        "humaneval",
        files[0],
        "--completions",
        files[1],
        "--out",
        tmp_path / "out",
    ]
    assert main(list(map(str, arguments))) == 2
    [problem] = capsys.readouterr().err.splitlines()
    assert expected in problem


def test_unknown_tasks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = write_lines(tmp_path / "tasks", task())
    samples = write_lines(tmp_path / "samples", *[{"task_id": f"T/{at}", "completion": ""} for at in (7, 8, 7)])
    out = str(tmp_path / "out")
    assert (
        main(
            [
                "grade",
                "--format",
                "humaneval",
                str(tasks),
                "--completions",
                str(samples),
                "--out",
                out,
                "--json",
            ]
        )
        == 2
    )
    assert json.loads(capsys.readouterr().out)["error"][0].endswith("found 'T/7', 'T/8'")
