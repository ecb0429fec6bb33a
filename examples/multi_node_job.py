"""A Ray job on a cluster that is already there: ``python examples/multi_node_job.py [--address ADDRESS]``.

Stands for a trainer with several rollout workers: the driver starts the cluster's grader, and each worker, wherever
it runs, finds it with ``get()`` and has its own groups graded. All nodes grade for all workers. Without ``--address``
it joins the cluster of this machine (``ray start --head``); the grader is stopped at the end.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

import collimate_ray

WORKERS = 4
GROUPS = 3

SPEC = {
    "kind": "stdin_stdout",
    "tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}],
    "limits": {"time_s": 5},
}

#: What a policy might have sampled for "add two numbers": right, wrong, crashing, no code.
COMPLETIONS = [
    "```python\nprint(sum(map(int, input().split())))\n```",
    "```python\na, b = map(int, input().split())\nprint(a - b)\n```",
    "```python\nprint(int(input()))\n```",
    "The answer is 5.",
]


@ray.remote(num_cpus=0)
def rollout_worker(number: int) -> list[list[float]]:
    """Sample (here: take) completions and have them graded; gives the rewards of each group."""
    grader = collimate_ray.get()
    refs = [
        grader.grade_group.remote(COMPLETIONS, SPEC, seeds="crn", group_id=f"worker-{number}/prompt-{prompt}")
        for prompt in range(GROUPS)
    ]
    return [group.rewards.tolist() for group in ray.get(refs)]


def report(stats: dict[str, Any]) -> None:
    """Print where the work was done."""
    print(f"{stats['grades']} grades, verdicts {stats['verdicts']}")
    for node_id, node in stats["nodes"].items():
        print(f"node {node_id[:12]} on {node['host']}: {node['done']} grades in {node['slots']} slots")


def main() -> None:
    """Join the cluster, start the grader, run the workers."""
    parser = argparse.ArgumentParser(description="Grade from several workers of a running Ray cluster.")
    parser.add_argument("--address", default="auto", help="of the cluster's head, as host:port (default: auto)")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False)
    try:
        grader = collimate_ray.start()
        rewards = ray.get([rollout_worker.remote(number) for number in range(WORKERS)])
        print(f"{WORKERS} workers, {GROUPS} groups each; rewards of a group: {rewards[0][0]}")
        report(ray.get(grader.stats.remote()))
    finally:
        collimate_ray.stop()
        ray.shutdown()


if __name__ == "__main__":
    main()
