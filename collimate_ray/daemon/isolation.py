"""Which tier of isolation this machine allows, found by trying: what a trial exec got is what health reports.

Must not promise anything untried, nor step down in silence. Tiers, best first (``sandbox/wire.py``): ``full`` (needs
CAP_SYS_ADMIN), ``userns``, ``landlock``, ``seccomp``, ``rlimits``. Source: notes/SANDBOX.md, section 1.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from collimate_ray.daemon.cell import Cell
from collimate_ray.daemon.execution import Execution
from collimate_ray.daemon.home import Home, remove_tree
from collimate_ray.daemon.outcome import BringupFailed, CellLost, ExecRequest
from collimate_ray.daemon.zygote import Zygote
from collimate_ray.errors import ConfigError
from collimate_ray.jail import landlock, seccomp
from collimate_ray.jail.process import interpreter_readable
from collimate_ray.sandbox.wire import TIERS

_log = logging.getLogger(__name__)

#: Served only where the user says so: nothing there keeps sessions from each other's files.
UNSAFE = ("seccomp", "rlimits")
#: Linux's first Landlock that scopes signals and abstract sockets.
_SCOPING_ABI = 6
_NAMESPACES = ("full", "userns")
#: Short names of what each tier has, for health.
_PARTS = {
    "full": ("pid-ns", "mount-ns", "ipc-ns", "uts-ns", "net-ns", "pivoted-root", "private-tmp", "bounded-disk"),
    "userns": (
        "user-ns",
        "pid-ns",
        "mount-ns",
        "ipc-ns",
        "uts-ns",
        "net-ns",
        "pivoted-root",
        "private-tmp",
        "bounded-disk",
    ),
    "landlock": ("private-directory",),
    "seccomp": ("private-directory",),
    "rlimits": ("private-directory",),
}
#: Imports from the standard library, writes where an exec may write, tries what the tier must refuse, tells all of it.
_TRIAL = """
import decimal, json, os, socket, tempfile
with tempfile.NamedTemporaryFile(dir="."), tempfile.NamedTemporaryFile():
    pass
try:
    socket.socket().close()
    network = True
except OSError:
    network = False
try:
    os.listdir("/root/..") and os.listdir("/home")
    home = True
except OSError:
    home = False
print(json.dumps({"uid": os.getuid(), "pid": os.getpid(), "network": network, "home": home}))
"""


@dataclass(frozen=True)
class Fence:
    """How sessions are fenced in.

    Attributes:
        tier: One of ``TIERS``.
        own_uids: Each session has a uid that no other process of the machine has.
        landlock_abi: Of Landlock's interface as it is used; 0: not at all.
        missing: Why each better tier is not in force, by its name.
        proc: Sessions have a /proc.
        cgroups: Short names of what bounds all processes of an exec together.
    """

    tier: str
    own_uids: bool
    landlock_abi: int
    missing: dict[str, str] = field(default_factory=dict)
    proc: bool = True
    cgroups: tuple[str, ...] = ()

    def without_cgroups(self, why: str) -> Fence:
        """Give the same, with the reason why there are no cgroups."""
        return replace(self, missing={**self.missing, "cgroups": why})

    @property
    def namespaces(self) -> bool:
        """Whether sessions have namespaces of their own."""
        return self.tier in _NAMESPACES

    @property
    def egress(self) -> str:
        """What sessions can reach: ``none``, or ``open`` where nothing stops them."""
        return "open" if self.tier == "rlimits" else "none"

    @property
    def parts(self) -> tuple[str, ...]:
        """Short names of what is in force."""
        parts = ["rlimits", "no-new-privs", "no-capabilities", *_PARTS[self.tier]]
        parts += ["own-uid"] if self.own_uids else []
        parts += ["seccomp"] if self.tier != "rlimits" else []
        parts += [f"landlock-{self._abi_in_force}"] if self._abi_in_force else []
        return (*parts, "proc" if self.proc else "no-proc", *self.cgroups)

    @property
    def _abi_in_force(self) -> int:
        """Landlock's, 0 where it is not used: in namespaces its scopes are all that it adds."""
        used = self.tier == "landlock" or (self.namespaces and self.landlock_abi >= _SCOPING_ABI)
        return self.landlock_abi if used else 0

    def setup(self) -> dict[str, Any]:
        """Give this fence's part of a zygote's set-up."""
        own = {"tier": self.tier, "namespaces": self.namespaces, "landlock_abi": self._abi_in_force}
        return {**own, **self._filters()}

    def _filters(self) -> dict[str, str]:
        """Give the filter of candidates, and that of the runner's keeper, which signals its candidates."""
        if self.tier == "rlimits":
            return {"filter": "", "keeper_filter": ""}
        scoped = self._abi_in_force >= _SCOPING_ABI
        # sockets that have a path are seen where files are: scopes hide only those without one
        build = functools.partial(
            seccomp.build, unix_sockets=scoped and self.namespaces, own_files_only=self.tier == "landlock"
        )
        own = build(own_signals_only=not scoped and not self.namespaces)
        return {"filter": own.hex(), "keeper_filter": build().hex()}


#: Makes a zygote, not started, that has no template's modules: fence, and what to call when it dies.
TrialZygote = Callable[[Fence, Callable[[Zygote], None]], Zygote]


async def choose_fence(
    home: Home, make: TrialZygote, *, tier: str | None, allow_unsafe: bool, max_abi: int | None
) -> Fence:
    """Find the best tier that works here, and set the home for it.

    Args:
        home: The daemon's directory.
        make: Makes the zygote of a trial.
        tier: Enter this one and no other.
        allow_unsafe: Also the last two, which untrusted code should not run in.
        max_abi: Take the kernel's Landlock for one of this age.

    Raises:
        ConfigError: None works, or only one that was not allowed.
    """
    missing: dict[str, str] = {}
    for each in TIERS[::-1] if tier is None else (tier,):
        fence, reason = await try_tier(home, make, each, max_abi)
        if fence is None:
            missing[each] = reason
            continue
        if each in UNSAFE and not allow_unsafe:
            raise ConfigError(
                f"serve: expected --allow-unsafe, since this machine gives no better tier than {each!r} and "
                f"sessions there can read each other's files ({_told(missing)})"
            )
        for name, why in missing.items():
            _log.warning("tier=%s is not in force: %s", name, why)
        return replace(fence, missing=missing)
    raise ConfigError(f"serve: expected that an exec can run here, found: {_told(missing)}")


async def try_tier(home: Home, make: TrialZygote, tier: str, max_abi: int | None) -> tuple[Fence | None, str]:
    """Try a tier, and set the home for it; give the fence, or None and why it does not work here."""
    reason = ""
    for fence in _fences(tier, max_abi):
        home.set_fence(namespaces=fence.namespaces, own_uids=fence.own_uids)
        why, proc = await _trial(home, make, fence)
        if not why:
            return replace(fence, proc=proc), ""
        reason = reason or why
    return None, reason


def _told(missing: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in missing.items())


def _fences(tier: str, max_abi: int | None) -> list[Fence]:
    """List what to try for a tier, best first."""
    abi = landlock.abi(max_abi)
    if tier in _NAMESPACES:
        return [Fence(tier, tier == "full", abi)]
    # only root makes another user of a process, and only one that can read the interpreter
    uids = os.geteuid() == 0 and interpreter_readable()
    return [Fence(tier, own, abi) for own in ((True, False) if uids else (False,))]


async def _trial(home: Home, make: TrialZygote, fence: Fence) -> tuple[str, bool]:
    """Run the trial; give "" or why it failed, and whether there is a /proc."""
    if fence.tier == "landlock" and not fence.landlock_abi:
        return "the kernel has no Landlock (Linux 5.13 with CONFIG_SECURITY_LANDLOCK)", False
    zygote = make(fence, lambda _: None)
    uid = home.uid_of(0)
    place = None if fence.namespaces else home.make_place(f"trial-{fence.tier}-{uid}", uid)
    cell = Cell(zygote, 0, uid, place, None)
    try:
        await zygote.start()
        await cell.open()
        outcome = await Execution(ExecRequest("trial", "code", _TRIAL, "0" * 64), cell).run()
    except (BringupFailed, CellLost) as error:
        return str(error), False
    finally:
        cell.kill()
        zygote.close()
        if place is not None:
            remove_tree(place.top)
    return _judged(fence, uid, outcome.output), bool(cell.parked.result()["proc"])


def _judged(fence: Fence, uid: int | None, output: bytes) -> str:
    """Give "" if the trial saw what the tier promises, else what it saw."""
    expected: dict[str, Any] = {"uid": os.getuid() if uid is None else uid, "network": fence.egress == "open"}
    if fence.namespaces or fence.tier == "landlock":
        expected["home"] = False
    try:
        seen = json.loads(output)
        good = all(seen[name] == value for name, value in expected.items())
    except (ValueError, KeyError, TypeError):
        good = False
    return "" if good else f"the trial said {output[-300:]!r}, expected {expected}"
