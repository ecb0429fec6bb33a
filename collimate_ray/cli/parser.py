"""Options of the command line. Must not import anything heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from collimate_ray import __version__
from collimate_ray.cli import texts
from collimate_ray.cli.errors import UsageError
from collimate_ray.sandbox.wire import TIERS
from collimate_ray.seeds import MODES

#: Raylets that one machine is asked to run at most: each takes about 130 MiB and a second of start-up.
MOST_NODES = 64

#: What argparse (Python 3.10 to 3.13) says, and how this project says it: what was expected, what was found.
_PHRASES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^argument ([^ :]+): ", r"\1: "),
    # some versions quote the choices
    (
        r"invalid choice: (.*) \(choose from (.*)\)$",
        lambda m: f"expected one of {m[2].replace(chr(39), '')}, found {m[1]}",
    ),
    (r"^the following arguments are required: (.*)$", r"\1: expected a value, found nothing"),
    (r"expected one argument$", "expected a value, found nothing"),
    (r"not allowed with argument ([^ ]+)$", r"expected only without \1, found both"),
    (r"ignored explicit argument (.*)$", r"expected no value, found \1"),
)


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        for pattern, phrase in _PHRASES:
            message = re.sub(pattern, phrase, message)
        raise UsageError(self.prog, message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; the result has ``command`` and the options of that command.

    Raises:
        UsageError: It is not one.
        SystemExit: ``--help`` or ``--version`` was answered.
    """
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        # of "--node 3" the option is the mistake, and its value only follows from it
        found = next((word for word in unknown if word.startswith("-")), unknown[0])
        kind = "option" if found.startswith("-") else "argument"
        raise UsageError(f"collimate-ray {args.command}", f"{found}: unknown {kind}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = _Parser("collimate-ray", description=texts.MAIN, formatter_class=_Raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"collimate-ray {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(_command(commands, "demo", texts.DEMO, "grade a small task set on a local cluster"))
    _add_grade(_command(commands, "grade", texts.GRADE, "grade a file of completions"))
    _add_serve(_command(commands, "serve", texts.SERVE, "run the sandbox daemon of one node"))
    _add_doctor(
        _command(commands, "doctor", texts.DOCTOR, "tell what this machine gives the sandbox, and what is missing")
    )
    return parser


_Raw = argparse.RawDescriptionHelpFormatter


def _command(commands: Any, name: str, description: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, description=description, help=summary, formatter_class=_Raw, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output, for programs")
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=whole(1, MOST_NODES), default=3, metavar="N", help="raylets (default 3)")
    parser.add_argument("--out", metavar="DIR", help="directory of the results (default ./collimate-demo-<time>)")


def _add_grade(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="file of groups, '-' for standard input")
    parser.add_argument("--out", required=True, metavar="OUT", help="file of the results")
    parser.add_argument("--format", choices=("jsonl", "humaneval"), default="jsonl", help="format of INPUT")
    parser.add_argument("--completions", metavar="FILE", help="with --format humaneval: a file, or 'reference'")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--nodes", type=whole(1, MOST_NODES), metavar="N", help="start N raylets here (default 1)")
    where.add_argument("--address", metavar="ADDR", help="join a running cluster: host:port, ray://host:port or auto")
    parser.add_argument("--slots", type=whole(1, 1024), metavar="N", help="grades at once on a node")
    parser.add_argument(
        "--deadline-s",
        type=seconds,
        default=600.0,
        metavar="S",
        help="a group may take so long (default 600)",
    )
    parser.add_argument(
        "--seeds",
        choices=MODES,
        default="crn",
        help="crn (default): one a group, made from its id; vanilla: fresh ones; deterministic: one for all",
    )
    parser.add_argument("--template", metavar="ID", help="template of specs that name none (default python)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="unix socket to serve, 107 bytes at most")
    parser.add_argument("--host", metavar="HOST", help="loopback address (default 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535), metavar="N", help="TCP port; 0: any free one")
    parser.add_argument("--slots", type=whole(1, 1024), metavar="N", help="execs at once")
    parser.add_argument("--memory-mib", type=whole(1, 1 << 30), metavar="M", help="memory of all sessions, MiB")
    parser.add_argument("--linger-s", type=seconds, metavar="S", help="exit after S seconds without work or owner")
    parser.add_argument("--templates", metavar="DIR", help="directory of templates of your own (README, Templates)")
    parser.add_argument("--tier", choices=TIERS[::-1], help="enter this tier of isolation and no other")
    parser.add_argument("--require-tier", choices=TIERS[::-1], help="refuse to serve below this tier")
    parser.add_argument("--allow-unsafe", action="store_true", help="serve in the tiers seccomp and rlimits too")
    parser.add_argument("--verbose", action="store_true", help="a log line for each session and exec")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--templates", metavar="DIR", help="directory of templates of your own, tried too")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Make an option type: a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(most)) else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, found {text[:40]!r}")
        return value

    return parse


def seconds(text: str) -> float:
    """Option type: a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text[:40]!r}")
    return value
