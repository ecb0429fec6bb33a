"""The command line: ``collimate-ray demo | grade | serve | doctor``. The only package that prints.

Must stay light to import (the daemon starts through it): each command imports what it needs. Exit codes:
design API, "CLI".
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence

from collimate_ray.cli import signals, streams
from collimate_ray.cli.errors import Exit, InputError, NoCluster, OutputLost, UsageError
from collimate_ray.cli.parser import parse
from collimate_ray.cli.progress import note
from collimate_ray.errors import ConfigError, SpecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; those of this process by default.

    Returns:
        The exit code, see ``Exit``.
    """
    streams.ensure()
    try:
        return _run(argv)
    finally:
        streams.settle()


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parse(argv)
    except SystemExit as done:  # argparse answered --help or --version
        return int(done.code or 0)
    except UsageError as error:
        streams.say(str(error))
        return Exit.BAD_INPUT
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        return _command(args.command)(args)
    except (ConfigError, SpecError) as error:
        return _fail(error, Exit.BAD_INPUT, args)
    except OutputLost as error:
        return _fail(error, Exit.BAD_INPUT, args)
    except NoCluster as error:
        return _fail(error, Exit.NO_CLUSTER, args)
    except KeyboardInterrupt:
        note("interrupted")
        return Exit.INTERRUPTED


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    if name == "serve":
        from collimate_ray.cli.serve import run_serve

        return run_serve
    if name == "doctor":
        from collimate_ray.cli.doctor import run_doctor

        return run_doctor
    # numbers of any length are honest test values; Python's own limit is against strangers' text (bug B09)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    signals.arm()
    from collimate_ray.cli.grade import run_demo, run_grade

    return run_demo if name == "demo" else run_grade


def _fail(error: Exception, code: Exit, args: argparse.Namespace) -> int:
    for line in str(error).splitlines():
        note(f"error: {line}")
    if args.json:
        problems = list(error.problems) if isinstance(error, InputError) else [str(error)]
        streams.emit(json.dumps({"error": problems, "exit_code": int(code)}))
    return code
