"""Each example, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest_ray import cluster
from ray.cluster_utils import Cluster

__all__ = ["cluster"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart() -> None:
    lines = run("quickstart.py").splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["passed", "reward", "1.00"],
        ["failed", "reward", "0.50"],
        ["timeout", "reward", "0.00"],
        ["no_code", "reward", "0.00"],
    ]


def test_multi_node_job(cluster: Cluster) -> None:
    said = run("multi_node_job.py", "--address", cluster.address)
    assert "rewards of a group: [1.0, 0.0, 0.0, 0.0]" in said
    assert "48 grades" in said
    assert said.count("node ") == 3


def test_the_first_snippet_of_the_readme() -> None:
    snippet = (EXAMPLES.parent / "README.md").read_text().split("```python\n", 1)[1].split("\n```\n", 1)[0]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "[1. 0. 0.] [ True  True  True] ['passed', 'failed', 'no_code']" in done.stdout
