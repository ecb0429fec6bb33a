"""``collimate-ray grade`` and ``demo``: from options to an exit code. Must not talk to Ray itself."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from collimate_ray.cli.errors import Exit, InputError
from collimate_ray.cli.humaneval import REFERENCE, humaneval_rows
from collimate_ray.cli.inputs import STDIN, Row, read_rows
from collimate_ray.cli.output import OutFile
from collimate_ray.cli.progress import note
from collimate_ray.cli.report import Tally, render
from collimate_ray.cli.run import grade_rows
from collimate_ray.cli.session import Options
from collimate_ray.cli.streams import emit
from collimate_ray.config import read_environment

#: Where ``demo`` writes by default, below the current directory; strftime(3).
DEMO_DIRECTORY = "collimate-demo-%Y%m%d-%H%M%S"


def run_grade(args: argparse.Namespace) -> int:
    """Run ``collimate-ray grade``.

    Returns:
        Exit code: 0, 1 or 130.

    Raises:
        InputError: Something is wrong with the input, OUT or an option.
        NoCluster: There is no cluster.
    """
    template = args.template or read_environment().template
    rows = _rows(args, template)
    inputs = [args.input, args.completions] if args.completions not in (None, REFERENCE) else [args.input]
    options = Options(
        nodes=args.nodes or 1,
        address=args.address,
        slots=args.slots,
        deadline_s=args.deadline_s,
        seeds=args.seeds,
        template=template or "python",
        bar=not args.json,
    )
    return grade_and_report(rows, OutFile(args.out, *inputs), options, args.json)


def _rows(args: argparse.Namespace, template: str | None) -> list[Row]:
    if args.format == "jsonl":
        if args.completions is not None:
            raise InputError(["--completions: expected only with --format humaneval"])
        return read_rows(args.input, template)
    if args.completions is None:
        raise InputError([f"--completions: expected {REFERENCE!r} or a file with --format humaneval, found nothing"])
    if args.input == args.completions == STDIN:
        raise InputError(["--completions: expected a file, found '-', which is the input already"])
    rows, left_out = humaneval_rows(args.input, args.completions, template)
    if left_out:
        note(f"{len(left_out)} tasks have no completion and are left out")
    return rows


def run_demo(args: argparse.Namespace) -> int:
    """Run ``collimate-ray demo``: grade the task set that is shipped with the package.

    Returns:
        Exit code: 0, 1 or 130.

    Raises:
        InputError: The output directory can't be made.
        NoCluster: There is no cluster.
    """
    with as_file(files("collimate_ray.cli") / "data" / "demo.jsonl") as path:
        rows = read_rows(str(path))
    directory = Path(args.out or time.strftime(DEMO_DIRECTORY))
    try:
        directory.mkdir(parents=args.out is not None, exist_ok=args.out is not None)
    except OSError as error:
        raise InputError([f"--out: expected a directory, found {directory}: {error.strerror}"]) from None
    out = OutFile(str(directory / "results.jsonl"))
    return grade_and_report(rows, out, Options(nodes=args.nodes, daemon="embedded", bar=not args.json), args.json)


def grade_and_report(rows: Sequence[Row], out: OutFile, options: Options, as_json: bool) -> int:
    """Grade rows, close OUT, show what it came to.

    Returns:
        Exit code: 0, 1 if some grades have no verdict, 130 if interrupted.
    """
    if not as_json:
        note(_start_line(options, len(rows)))
    try:
        tally = grade_rows(rows, out, options)
    except KeyboardInterrupt:
        note(f"interrupted: {out.lines} of {len(rows)} groups are in {out.path}")
        return Exit.INTERRUPTED
    finally:
        out.close()
    code = Exit.NO_VERDICT if tally.without_verdict else Exit.DONE
    _show(tally, out.path, code, as_json)
    return code


def _start_line(options: Options, groups: int) -> str:
    """Say what takes the seconds before the first grade."""
    what = f"joining the cluster at {options.address}"
    if not options.address:
        what = f"starting a local Ray cluster of {_counted(options.nodes, 'node')}"
    return f"{what} to grade {_counted(groups, 'group')}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _show(tally: Tally, out: str, code: int, as_json: bool) -> None:
    if as_json:
        emit(json.dumps({**tally.summary(), "out": out, "exit_code": int(code)}))
    else:
        emit(render(tally, out))
