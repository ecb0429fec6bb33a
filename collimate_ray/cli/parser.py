"""Options and help texts of the command line. Must not import anything heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from collimate_ray.seeds import MODES

#: Raylets that one machine is asked to run at most: each takes about 130 MiB and a second of start-up.
MOST_NODES = 64

_EXIT_CODES = """\
exit codes:
  0    done
  1    done, but some grades have no verdict ("valid" is false: never train on them)
  2    bad input: each wrong line or option is named, and nothing was started
  3    no cluster, or it went away
  130  interrupted (Ctrl-C, SIGTERM); no process is left
"""

_MAIN = f"""\
Grades completions of code-writing models in sandboxes on a Ray cluster: completions and a
spec in, true rewards out.

examples:
  collimate-ray demo                        see it work, on this machine, in a minute
  collimate-ray grade groups.jsonl --out rewards.jsonl
  collimate-ray serve --socket /tmp/sandbox/serve.sock

{_EXIT_CODES}"""

_GRADE = f"""\
Grades every group of INPUT and writes one line a group to OUT, as each finishes.

INPUT (JSON lines, plain or gzip, '-' for standard input), one group a line:
  {{"id": "sum-1",
   "completions": ["```python\\ndef add(a, b):\\n    return a + b\\n```"],
   "spec": {{"kind": "unit_tests", "entry": "add",
            "tests": [{{"input": [1, 2], "expected": 3}}]}}}}
  kinds of spec: unit_tests, property, stdin_stdout, assert_tests
  "limits" (optional) win over the spec's: {{"time_s": 2, "memory_mib": 256}}
  "seed" (optional) is for all members of the group: 64 hex characters

OUT, one group a line, members in the order of the completions (an existing file is replaced
once grading starts):
  {{"id": "sum-1", "rewards": [1.0], "valid": [true],
   "results": [{{"verdict": "passed", "passed": 1, "total": 1, ...}}]}}

--format humaneval: INPUT is HumanEval.jsonl(.gz), and --completions is 'reference' (the file's
own solutions) or a file of lines {{"task_id": "HumanEval/0", "completion": "..."}}. Lines of one
task form its group. A completion that does not define the entry point continues the prompt.

examples:
  collimate-ray grade groups.jsonl --out rewards.jsonl --nodes 3
  collimate-ray grade groups.jsonl.gz --out rewards.jsonl --address 10.0.0.5:6379 --json
  collimate-ray grade --format humaneval HumanEval.jsonl.gz --completions reference --out r.jsonl

{_EXIT_CODES}"""

_DEMO = f"""\
Starts a local Ray cluster and the sandbox daemon, grades a small task set that is shipped with
the package (right, partly right, wrong, crashing, looping and hostile completions), shows
verdicts and speed, and leaves nothing running.

Writes DIR/results.jsonl, one line a group, in the format of 'collimate-ray grade --help'.

examples:
  collimate-ray demo
  collimate-ray demo --nodes 2 --out /tmp/demo --json

{_EXIT_CODES}"""

_SERVE = f"""\
Runs the sandbox daemon of one node in the foreground, on a unix socket or on a loopback port.
Whoever can connect can run code in its sandboxes: the socket's directory is private (0700), a
port is open to every user of this machine.

SIGTERM drains: new work is refused, running work finishes, then it exits with 0. A second one,
or Ctrl-C at any time, ends it at once. The first line on standard error says where it listens;
with --json a JSON line on standard output says it too:
  {{"socket": "/tmp/sandbox/serve.sock", "pid": 4711}}

examples:
  collimate-ray serve --socket /tmp/sandbox/serve.sock
  collimate-ray serve --port 8080 --slots 8
  COLLIMATE_SERVE_SOCKET=/tmp/sandbox/serve.sock python train.py

{_EXIT_CODES}"""


def build_parser() -> argparse.ArgumentParser:
    """Make the parser; its namespace has ``command`` and the options of that command."""
    parser = argparse.ArgumentParser("collimate-ray", description=_MAIN, formatter_class=_Raw)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(_command(commands, "demo", _DEMO, "grade a small task set on a local cluster"))
    _add_grade(_command(commands, "grade", _GRADE, "grade a file of completions"))
    _add_serve(_command(commands, "serve", _SERVE, "run the sandbox daemon of one node"))
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
