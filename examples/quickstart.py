"""Grade a group of completions on a local Ray: ``python examples/quickstart.py``.

Starts Ray on this machine, a grader on it, grades four completions of one prompt, and prints rewards, verdicts and
the advantages that GRPO makes of them.
"""

from __future__ import annotations

import ray

import collimate_ray

SPEC = {
    "kind": "unit_tests",
    "entry": "solve",
    "tests": [{"input": [[3, 1, 2]], "expected": [1, 2, 3]}, {"input": [[]], "expected": []}],
    "scoring": "fraction",
    "limits": {"time_s": 2},
}

COMPLETIONS = [
    "Sort it:\n```python\ndef solve(xs):\n    return sorted(xs)\n```",
    "```python\ndef solve(xs):\n    return xs\n```",
    "```python\ndef solve(xs):\n    while True:\n        pass\n```",
    "I am not sure how to do that.",
]


def main() -> None:
    """Start, grade, print, stop."""
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        grader = collimate_ray.start()
        group = ray.get(grader.grade_group.remote(COMPLETIONS, SPEC, seeds="crn"))
        for result, advantage in zip(group.results, group.advantages(), strict=True):
            name = result.verdict.value if result.verdict else result.error
            print(f"{name:8} reward {result.reward:.2f}  advantage {advantage:+.2f}")
    finally:
        collimate_ray.stop()
        ray.shutdown()


if __name__ == "__main__":
    main()
