"""``collimate-ray doctor``: what this machine gives the sandbox, and what is missing. Must not decide it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from collimate_ray.cli import streams
from collimate_ray.cli.errors import Exit
from collimate_ray.config import read_environment


def run_doctor(args: argparse.Namespace) -> int:
    """Run ``collimate-ray doctor``.

    Returns:
        0, or 3 if no daemon would serve here without ``--allow-unsafe`` or a template is broken.

    Raises:
        ConfigError: The directory of templates is wrong.
    """
    from collimate_ray.daemon.examine import examine

    report = examine(args.templates, read_environment().max_landlock_abi)
    if args.json:
        streams.emit(json.dumps(report))
    else:
        streams.emit(_shown(report))
    broken = any(not seen["works"] for seen in report["templates"].values())
    return Exit.DONE if report["safe"] and not broken else Exit.NO_CLUSTER


def _shown(report: dict[str, Any]) -> str:
    console = Console(width=110, highlight=False)
    with console.capture() as captured:
        machine = report["machine"]
        console.print(
            f"Linux {machine['kernel']} {machine['architecture']}, uid {machine['uid']}, {machine['cores']} cores, "
            f"Python {machine['python']}, Landlock ABI {machine['landlock_abi']}"
        )
        console.print(_tiers(report))
        console.print(_templates(report))
        groups = report["cgroups"]
        console.print(f"cgroups: {', '.join(groups['parts']) if groups['works'] else 'none'}")
        for line in report["advice"] or ["nothing is missing"]:
            console.print(f"- {line}", markup=False)
    return captured.get().rstrip("\n")


def _tiers(report: dict[str, Any]) -> Table:
    table = Table(title="tiers of isolation, best first", title_justify="left")
    for column in ("tier", "works", "what is in force"):
        table.add_column(column)
    for tier, seen in report["tiers"].items():
        used = " (used)" if tier == report["tier"] else ""
        table.add_row(tier + used, "yes" if seen["works"] else "no", ", ".join(seen["parts"]))
    return table


def _templates(report: dict[str, Any]) -> Table:
    table = Table(title="templates", title_justify="left")
    for column in ("template", "works", "bare fork, ms"):
        table.add_column(column)
    for name, seen in report["templates"].items():
        table.add_row(name, "yes" if seen["works"] else "no", str(seen.get("bare_fork_ms", "")))
    return table
