"""Rows from HumanEval's file and from completions of its tasks (``grade --format humaneval``).

A task is ``{"task_id", "prompt", "entry_point", "canonical_solution", "test"}``
(github.com/openai/human-eval, data/); a completion is ``{"task_id", "completion"}``, lines of one task form
its group. Code is made here, so that what is graded is what the model meant: a completion that defines the
entry stands by itself, any other continues the prompt. The code then goes as a fenced block whose fence is
longer than any inside, which extraction gives back unchanged. Must not run any code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collimate_ray.cli.errors import InputError
from collimate_ray.cli.inputs import Problem, Row, check_keys, expect, read_objects, shown
from collimate_ray.extract import defines, extract_code, syntax_tree
from collimate_ray.spec import spec_from_dict

#: Value of ``--completions`` that grades the file's own solutions.
REFERENCE = "reference"

_TASK_KEYS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True)
class Task:
    """A task; the fields are the file's, but for ``prelude``: the prompt without its last function."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str
    prelude: str


def humaneval_rows(path: str, completions: str, template: str | None = None) -> tuple[list[Row], list[str]]:
    """Make rows of a HumanEval file.

    Args:
        path: The file, JSON lines, plain or gzip.
        completions: ``"reference"`` or a file of completions.
        template: Template of the specs, or None for the default.

    Returns:
        Rows in the order of the file, and ids of the tasks that have no completion.

    Raises:
        InputError: Some line of either file is wrong, or a completion's task is not in the file.
    """
    tasks = _read_tasks(path)
    if completions == REFERENCE:
        texts = {task.task_id: [task.prompt + task.canonical_solution] for task in tasks.values()}
    else:
        texts = _read_completions(completions, path, tasks)
    rows = [_row(task, texts[task.task_id], template) for task in tasks.values() if task.task_id in texts]
    return rows, [name for name in tasks if name not in texts]


def _read_tasks(path: str) -> dict[str, Task]:
    tasks: dict[str, Task] = {}

    def make(data: dict[str, Any]) -> None:
        task = _task(data)
        if task.task_id in tasks:
            raise Problem(f"task_id: expected a task of its own, found {shown(task.task_id)} a second time")
        tasks[task.task_id] = task

    read_objects(path, make)
    return tasks


def _task(data: dict[str, Any]) -> Task:
    check_keys(data, _TASK_KEYS, tuple(data))
    for key in _TASK_KEYS:
        expect(isinstance(data[key], str), key, "a string", data[key])
    entry = data["entry_point"]
    expect(entry.isidentifier(), "entry_point", "the name of a function", entry)
    prelude = prelude_of(data["prompt"], data["canonical_solution"])
    return Task(**{key: data[key] for key in _TASK_KEYS}, prelude=prelude)


def prelude_of(prompt: str, solution: str = "    pass\n") -> str:
    """Give the prompt without its last top-level function, decorators and all.

    Args:
        prompt: A task's prompt.
        solution: A body for a prompt whose last function has none yet.

    Raises:
        Problem: The prompt is not Python, or has no function.
    """
    tree = syntax_tree(prompt) or syntax_tree(prompt + solution)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in tree.body if isinstance(node, kinds)] if tree else []
    if not functions:
        raise Problem(f"prompt: expected Python that ends in a function, found {shown(prompt)}")
    last = functions[-1]
    first_line = min([last.lineno, *(node.lineno for node in last.decorator_list)])
    # by "\n" only: str.splitlines also cuts at characters that are no line ends in Python source
    return "".join(line + "\n" for line in prompt.split("\n")[: first_line - 1])


def _read_completions(path: str, tasks_path: str, tasks: Mapping[str, Task]) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    unknown: dict[str, None] = {}

    def make(data: dict[str, Any]) -> None:
        check_keys(data, ("task_id", "completion"), tuple(data))
        name, text = data["task_id"], data["completion"]
        expect(isinstance(name, str), "task_id", "a string", name)
        expect(isinstance(text, str), "completion", "a string", text)
        if name not in tasks:
            unknown[name] = None
            return
        texts.setdefault(name, []).append(candidate_code(text, tasks[name].prompt, tasks[name].entry_point))

    read_objects(path, make)
    if unknown:
        names = ", ".join(map(shown, unknown))
        raise InputError([f"{path}: task_id: expected tasks of {tasks_path}, found {names}"])
    return texts


def candidate_code(completion: str, prompt: str, entry: str) -> str:
    """Give the program that a completion stands for.

    Args:
        completion: Model text: a whole solution (fenced or not), or a continuation of the prompt.
        prompt: The task's prompt.
        entry: The function that the task asks for.

    Returns:
        The completion's code if it defines the entry at top level, else the prompt and what continues it:
        the text as it is, or its fenced code where only that makes a program.
    """
    code = extract_code(completion, entry)
    if code and defines(code, entry):
        return code
    if code and syntax_tree(prompt + completion) is None and syntax_tree(prompt + code) is not None:
        return prompt + code
    return prompt + completion


def fenced(code: str) -> str:
    """Wrap code in a fence longer than any run of backticks inside: extraction gives it back unchanged."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"{fence}python\n{code}\n{fence}"


def _row(task: Task, codes: list[str], template: str | None) -> Row:
    spec = {
        "kind": "assert_tests",
        "test_code": task.test,
        "entry": task.entry_point,
        "prelude": task.prelude,
    }
    if template is not None:
        spec["template"] = template
    return Row(task.task_id, spec_from_dict(spec), tuple(fenced(code) for code in codes))
