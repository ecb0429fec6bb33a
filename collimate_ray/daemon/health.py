"""What ``GET /v1/health`` says. Must not change anything. Source: design/WIRE.md and DESIGN.md ("Ray")."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from collimate_ray import __version__
from collimate_ray.daemon.isolation import Fence
from collimate_ray.daemon.table import Table

#: What this daemon adds to the plain wire and really does.
FEATURES = ("usage", "limits", "stdin", "runner", "seed-pins", "cancel", "exec-batch", "owner")


def health(table: Table, fence: Fence, runner_version: str, admin_socket: str | None) -> dict[str, Any]:
    """Make the answer.

    Args:
        table: Sessions and execs.
        fence: What stands between an exec and the machine.
        runner_version: Version of the preloaded runner.
        admin_socket: Path of the admin socket, or None: there is none.
    """
    gate = table.gate
    return {
        "status": "draining" if gate.draining else "ok",
        "sessions": len(table.listed()),
        "running": len(table.execs),
        "max_inflight": gate.slots,
        "queued": gate.queued,
        "templates": list(table.warm.names),
        "template_details": table.warm.details(),
        "version": __version__,
        "features": [*FEATURES, *(["drain"] if admin_socket else [])],
        "admin_socket": admin_socket,
        "tier": fence.tier,
        "isolation": list(fence.parts),
        "missing": fence.missing,
        "proc": fence.proc,
        "egress": fence.egress,
        "runner_version": runner_version,
        "slots": gate.slots,
        "memory_mib": gate.memory_mib,
        "pid": os.getpid(),
        "uid": os.getuid(),
        **standing(),
    }


def standing() -> dict[str, Any]:
    """Give this process's place among others: ``nice``, ``oom_score_adj``, and in words what a parent lowered."""
    nice, oom = os.getpriority(os.PRIO_PROCESS, 0), _oom_score_adj()
    return {"nice": nice, "oom_score_adj": oom, "lowered": _lowered(nice, oom)}


def _oom_score_adj() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/oom_score_adj").read_text("ascii"))
    return 0


def _lowered(nice: int, oom: int) -> list[str]:
    """Say what a parent such as Ray lowered and the kernel did not let the daemon put back."""
    notes = []
    if nice > 0:
        notes.append(f"nice is {nice}: the daemon itself waits behind the trainer; CAP_SYS_NICE would let it rise")
    if oom > 0:
        notes.append(
            f"oom_score_adj is {oom}: out of memory, the kernel may end the daemon before a session; "
            "CAP_SYS_RESOURCE would let it change that"
        )
    return notes
