"""Compares the embedded daemon with the published SDK's own stand-in, driven by the SDK's own ``grade_batch``.

Both serve at once; blocks of grades alternate between them, so that whatever else the machine does falls on both. Only
the ratios mean something; the interpreter's start time is printed beside them because the stand-in pays it for each
grade. Run it in the environment to be measured::

    python benchmarks/sdk.py            # needs collimate-rl (pip install "collimate_ray[test]")
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import collimate_rl

TESTS = [{"input": [2, 3], "expected": 5}, {"input": [10, -4], "expected": 6}, {"input": [0, 0], "expected": 0}]
PLAIN = "def solve(a, b):\n    return a + b\n"
NUMPY = "import numpy as np\ndef solve(a, b):\n    return int(np.array([a, b]).sum())\n"


@contextlib.contextmanager
def ours(slots: int) -> Iterator[str]:
    """Serve with the embedded daemon; give its URL."""
    command = [sys.executable, "-m", "collimate_ray", "serve", "--port", "0", "--slots", str(slots), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextlib.contextmanager
def stand_in() -> Iterator[str]:
    """Serve with the SDK's stand-in; give its URL."""
    program = (
        "import sys, time\nfrom collimate_rl.local_backend import LocalCollimateBackend\n"
        "b = LocalCollimateBackend(templates={'py': {'interpreter': sys.executable}}, host='127.0.0.1', port=0)\n"
        "b.start()\nprint(b.base_url, flush=True)\ntime.sleep(1e6)"
    )
    before = set(_left())
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().decode().strip()
        finally:
            process.terminate()
            for path in set(_left()) - before:
                path.unlink()


def _left() -> list[Path]:
    """List the files that the stand-in leaves, one for each grade."""
    return list(Path("/tmp").glob("colcand_*.py"))


def rate(client: Any, template: str, candidate: str, in_flight: int, seconds: float) -> float:
    """Give grades/s of one block."""
    spec = collimate_rl.UnitTestReward(tests=TESTS)
    done, began = 0, time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        batch = [candidate] * max(in_flight, 8)
        try:
            results = collimate_rl.grade_batch(client, template, batch, spec, concurrency=in_flight)
        except collimate_rl.CollimateError:
            if template != "py":  # the stand-in's listen backlog overflows now and then
                raise
            continue
        assert all(result.reward == 1.0 for result in results), results
        done += len(results)
    return done / spent


def compare(measure: Callable[[str], float], rounds: int) -> tuple[float, float, float]:
    """Give the medians of both, and of their ratios, in alternating blocks."""
    pairs = [(measure("ours"), measure("theirs")) for _ in range(rounds)]
    return (*(statistics.median(side) for side in zip(*pairs, strict=True)), statistics.median(a / b for a, b in pairs))


def noop_ms(client: Any, template: str, count: int) -> float:
    """Give the median of a no-op exec in a session, ms."""
    session = client.create_session(template)["session_id"]
    try:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            client.session_exec(session, code="pass")
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    finally:
        client.delete_session(session)


def create_ms(client: Any, template: str, count: int) -> float:
    """Give the median of ``fork_time_ms`` of new sessions, ms."""
    times = []
    for _ in range(count):
        made = client.create_session(template)
        times.append(made["fork_time_ms"])
        client.delete_session(made["session_id"])
    return statistics.median(times)


def start_ms(*arguments: str) -> float:
    """Give the median time of a start of this interpreter, ms."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block (default 2)")
    parser.add_argument("--slots", type=int, default=8, help="of the daemon (default 8)")
    options = parser.parse_args()
    print(f"interpreter {sys.version.split()[0]}: start {start_ms('-c', 'pass'):.1f} ms, ", end="")
    print(f"with numpy {start_ms('-c', 'import numpy'):.1f} ms")
    with ours(options.slots) as our_url, stand_in() as their_url:
        clients = {"ours": collimate_rl.CollimateClient(our_url), "theirs": collimate_rl.CollimateClient(their_url)}
        health = clients["ours"].health()
        print(f"tier {health['tier']}, {health['slots']} slots\n{'':26}{'ours':>10}{'stand-in':>10}{'ratio':>8}")
        for name, ours_template, candidate in (("python", "python", PLAIN), ("numpy", "numpy", NUMPY)):
            if ours_template not in health["templates"]:
                print(f"{name}: no such template here")
                continue
            templates = {"ours": ours_template, "theirs": "py"}
            for in_flight in (1, 8, 16):

                def block(side: str, templates=templates, candidate=candidate, in_flight=in_flight) -> float:  # type: ignore[no-untyped-def]
                    return rate(clients[side], templates[side], candidate, in_flight, options.seconds)

                row(f"{name}, {in_flight} in flight, /s", *compare(block, options.rounds))
        row("no-op in a session, ms", *compare(lambda side: noop_ms(clients[side], "py", 40), options.rounds))
        details = health["template_details"]["python"]
        made, bare = create_ms(clients["ours"], "python", 200), details["bare_fork_ms"]
        row("session create, ms (*)", made, bare, made / bare)
        print("(*) fork_time_ms beside a bare fork, exit and wait of the same zygote")


def row(name: str, first: float, second: float, ratio: float) -> None:
    """Print one line."""
    print(f"{name:26}{first:10.2f}{second:10.2f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parent)]
    main()
