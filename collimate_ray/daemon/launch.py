"""How an exec's process is started: command line, environment, and the request that it gets over a descriptor.

Must not start it. Nothing of a request is in the command line or the environment but its seed.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from collimate_ray.daemon.home import Home, Place
from collimate_ray.daemon.outcome import ExecRequest
from collimate_ray.daemon.processes import MARK
from collimate_ray.daemon.settings import DEFAULT_MEMORY_MIB

#: Limits of an exec that names none (design: API, limits).
_DEFAULT_LIMITS = {"memory_mib": DEFAULT_MEMORY_MIB, "processes": 64, "files": 256, "file_mib": 64}


def boot_command(lib: Path, request_fd: int, ready_fd: int) -> list[str]:
    """Give the command line of an exec's process; what it runs comes over ``request_fd``."""
    program = (
        f"import sys; sys.path.insert(0, {str(lib)!r}); import collimate_jail, collimate_boot; "
        f"collimate_boot.main(collimate_jail, {request_fd}, {ready_fd})"
    )
    return [sys.executable, "-I", "-B", "-X", "utf8", "-c", program]


def boot_request(request: ExecRequest, home: Home, place: Place, uid: int | None, keep: list[str]) -> dict[str, Any]:
    """Give what ``boot.py`` is told: all of the request but its standard input, and the fence."""
    given = request.own_limits
    limits = {} if request.kind == "runner" else {**_DEFAULT_LIMITS, **given}
    return {
        "kind": request.kind,
        "text": request.text,
        "seed": request.seed,
        "files": list(request.files),
        "limits": {name: int(limits[name]) for name in _DEFAULT_LIMITS if name in limits},
        "cpu_s": math.ceil(given["time_s"]) if "time_s" in given else None,
        "mode": home.mode,
        "uid": uid,
        "work": str(place.work),
        "tmp": str(place.tmp),
        "keep": keep,
        "parent": os.getpid(),
    }


def environment(request: ExecRequest, home: Home, place: Place, uid: int | None, mark: str) -> dict[str, str]:
    """Give an exec's whole environment: nothing of the daemon's own."""
    env = {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(place.work),
        "TMPDIR": "/tmp" if home.mode == "mounts" else str(place.tmp),
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        # many threads on a shared machine only wait for each other, and each reserves address space
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "COLLIMATE_SEED": request.seed,
        MARK: mark,
    }
    if uid is not None and request.kind == "runner":
        env["COLLIMATE_CANDIDATE_UID"] = str(uid)
    return env
