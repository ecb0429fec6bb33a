"""What this machine allows, for ``collimate-ray doctor``: each tier, cgroups and each template is tried.

Must not serve, and leaves nothing behind. Source: notes/SANDBOX.md, section 1; DESIGN.md ("Ray").
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from typing import Any

from collimate_ray.config import runtime_dir
from collimate_ray.daemon.cgroups import Cgroups, CgroupsUnusable
from collimate_ray.daemon.health import standing
from collimate_ray.daemon.home import Home
from collimate_ray.daemon.isolation import UNSAFE, Fence, choose_fence, try_tier
from collimate_ray.daemon.templates import load_templates
from collimate_ray.daemon.warm import Warm, trial_zygote
from collimate_ray.errors import ConfigError
from collimate_ray.jail import landlock
from collimate_ray.sandbox.wire import TIERS

#: How to get a tier that does not work.
_HINTS = {
    "full": "start the daemon as root with CAP_SYS_ADMIN; in a container: --cap-add SYS_ADMIN and a seccomp profile "
    "that allows mounts; in Kubernetes: a privileged DaemonSet",
    "userns": "allow unprivileged user namespaces: user.max_user_namespaces above 0, and where these exist "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp "
    "profile that allows unshare and mount; in Kubernetes: hostUsers: false",
    "landlock": "Linux 5.13 or newer with Landlock among its security modules (lsm=landlock,... at boot), and a "
    "container runtime whose seccomp profile allows the landlock_ calls",
    "seccomp": "a kernel with seccomp filters, on x86_64 or aarch64",
    "rlimits": "an interpreter that starts, and a writable temporary directory",
}


def examine(templates: str | None, max_abi: int | None) -> dict[str, Any]:
    """Try everything.

    Args:
        templates: Directory of the user's own templates, or None.
        max_abi: Take the kernel's Landlock for one of this age, or None.

    Returns:
        JSON-able: ``tier`` (the best that works, or None), ``safe`` (it may hold untrusted code), ``tiers``,
        ``isolation``, ``cgroups``, ``templates``, ``machine``, ``advice`` (lines for people).

    Raises:
        ConfigError: The templates' directory is wrong.
    """
    home = Home(runtime_dir() / f"doctor-{os.getpid()}")
    try:
        return asyncio.run(_examine(home, templates, max_abi))
    finally:
        home.close()


async def _examine(home: Home, directory: str | None, max_abi: int | None) -> dict[str, Any]:
    known = load_templates(directory)
    make = trial_zygote(home)
    tiers: dict[str, dict[str, Any]] = {}
    found: dict[str, Fence] = {}
    for tier in TIERS[::-1]:
        fence, reason = await try_tier(home, make, tier, max_abi)
        tiers[tier] = {"works": fence is not None, "reason": reason, "parts": list(fence.parts) if fence else []}
        if fence is not None:
            found[tier] = fence
    best = next(iter(found), None)
    report = {
        "tier": best,
        "safe": best is not None and best not in UNSAFE,
        "tiers": tiers,
        "cgroups": _cgroups(home),
        "templates": {},
        "machine": _machine(max_abi),
        **standing(),
    }
    if best is not None:
        await choose_fence(home, make, tier=best, allow_unsafe=True, max_abi=max_abi)
        for name, template in known.items():
            report["templates"][name] = await _template(Warm({name: template}, home, found[best], None, 1), name)
    report["advice"] = _advice(report, found.get(best or ""))
    return report


async def _template(warm: Warm, name: str) -> dict[str, Any]:
    try:
        await warm.start()
        return {"works": True, **warm.details()[name]}
    except ConfigError as error:
        return {"works": False, "reason": str(error)}
    finally:
        await warm.close()


def _cgroups(home: Home) -> dict[str, Any]:
    try:
        cgroups = Cgroups.open(home.digest)
    except CgroupsUnusable as error:
        return {"works": False, "reason": str(error), "parts": []}
    try:
        return {"works": True, "reason": "", "parts": list(cgroups.parts)}
    finally:
        cgroups.close()


def _machine(max_abi: int | None) -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "uid": os.geteuid(),
        "python": sys.version.split()[0],
        "landlock_abi": landlock.abi(max_abi),
        "cores": len(os.sched_getaffinity(0)),
    }


def _advice(report: dict[str, Any], fence: Fence | None) -> list[str]:
    lines = [
        f"{tier} does not work: {seen['reason']}; to get it: {_HINTS[tier]}"
        for tier, seen in report["tiers"].items()
        if not seen["works"] and (report["tier"] is None or TIERS.index(tier) > TIERS.index(report["tier"]))
    ]
    if fence is not None and not fence.proc:
        lines.append("sessions have no /proc: this container masks parts of it; run it with an unmasked /proc")
    if not report["cgroups"]["works"]:
        lines.append(f"memory of an exec's processes together is summed by polling: {report['cgroups']['reason']}")
    for name, seen in report["templates"].items():
        if not seen["works"]:
            lines.append(seen["reason"])
        elif seen["not_preloaded"]:
            lines.append(
                f"template {name}: its warm_up imports what is not preloaded: {', '.join(seen['not_preloaded'])}"
            )
    return [*lines, *report["lowered"]]
