"""HumanEval through the command line: every reference solution gets 1.0, every wrong mutant of it less."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_tools import read_lines, run, write_lines

Task = dict[str, Any]

#: A plain run of a task's test that takes longer than this is of no use as a confirmed mutant, s.
CONFIRM_S = 5
#: Programs that are tried for one mutant.
TRIES = 40

SWAPPED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def grade(path: Path, completions: object, out: Path) -> dict[str, Any]:
    options = ("--completions", completions, "--out", out, "--nodes", 3, "--json")
    done = run("grade", "--format", "humaneval", path, *options)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.timeout(600)
def test_every_reference_solution_is_right(humaneval_path: Path, tmp_path: Path) -> None:
    summary = grade(humaneval_path, "reference", tmp_path / "out.jsonl")
    wrong = {group["id"] for group in read_lines(tmp_path / "out.jsonl") if group["rewards"] != [1.0]}
    assert wrong == set()
    assert (summary["groups"], summary["verdicts"], len(summary["nodes"])) == (164, {"passed": 164}, 3)


@pytest.mark.timeout(900)
def test_every_mutant_is_wrong(humaneval_path: Path, humaneval: list[Task], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        pairs = list(pool.map(lambda at: mutants_of(humaneval, at), range(len(humaneval))))
    samples = [
        {"task_id": task["task_id"], "completion": f"```python\n{program}\n```"}
        for task, pair in zip(humaneval, pairs, strict=True)
        for program in pair
    ]
    assert len(samples) == 2 * len(humaneval)
    grade(humaneval_path, write_lines(tmp_path / "samples", *samples), tmp_path / "out.jsonl")
    groups = read_lines(tmp_path / "out.jsonl")
    assert len(groups) == len(humaneval)
    assert {group["id"] for group in groups if max(group["rewards"]) >= 1.0 or not all(group["valid"])} == set()


def mutants_of(tasks: list[Task], at: int) -> list[str]:
    """Two programs that fail the task's own test in a plain process."""
    return [confirmed(tasks[at], strangers(tasks, at)), confirmed(tasks[at], changed(tasks[at]))]


def confirmed(task: Task, programs: Iterator[str]) -> str:
    """The first program that ends, and fails."""
    for _, program in zip(range(TRIES), programs, strict=False):
        if fails(task, program):
            return program
    raise AssertionError(f"no mutant of {task['task_id']} fails its test")


def fails(task: Task, program: str) -> bool:
    text = f"{task['prompt']}    pass\n\n{program}\n\n{task['test']}\n\ncheck({task['entry_point']})\n"
    plain = [sys.executable, "-I", "-"]
    try:
        return subprocess.run(plain, input=text.encode(), capture_output=True, timeout=CONFIRM_S).returncode != 0
    except subprocess.TimeoutExpired:
        return False


def reference(task: Task) -> ast.Module:
    return ast.parse(task["prompt"] + task["canonical_solution"])


def strangers(tasks: list[Task], at: int) -> Iterator[str]:
    """Other tasks' solutions under this task's name."""
    for step in range(1, len(tasks)):
        other = tasks[(at + step) % len(tasks)]
        tree = reference(other)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == other["entry_point"]:
                node.name = tasks[at]["entry_point"]
            if isinstance(node, ast.Name) and node.id == other["entry_point"]:
                node.id = tasks[at]["entry_point"]
        yield ast.unparse(tree)


def changed(task: Task) -> Iterator[str]:
    """The solution with one constant, comparison or return value changed, in a shuffled but fixed order."""
    tree = reference(task)
    places = [at for at, node in enumerate(ast.walk(tree)) if can_change(node)]
    random.Random(task["task_id"]).shuffle(places)
    for place in places:
        mutant = copy.deepcopy(tree)
        change(list(ast.walk(mutant))[place])
        yield ast.unparse(mutant)


def can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPPED
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return is_number or (isinstance(node, ast.Return) and node.value is not None)


def change(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
    elif isinstance(node, ast.Return):
        node.value = ast.Constant("mutant")
