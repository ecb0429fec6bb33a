"""From templates to zygotes: what each is started with, and the trial grade that shows a broken one at start.

Must not serve requests. Source: notes/SANDBOX.md, sections 2c (pages) and 6.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from collimate_ray.daemon.cgroups import Cgroups
from collimate_ray.daemon.execution import Execution
from collimate_ray.daemon.home import Home
from collimate_ray.daemon.isolation import Fence
from collimate_ray.daemon.nursery import Nursery, Slots
from collimate_ray.daemon.outcome import BringupFailed, CellLost, ExecRequest
from collimate_ray.daemon.processes import MARK
from collimate_ray.daemon.templates import ALIASES, Template
from collimate_ray.daemon.zygote import Zygote
from collimate_ray.errors import ConfigError
from collimate_ray.sandbox.wire import TIERS
from collimate_ray.spec import runner_source

#: Sessions yield the processor to the trainer (design: Ray).
_NICE = 10
#: Most sessions that wait parked for one template: each holds a few MiB.
_MOST_PARKED = 16
#: The same, of those that can have several execs, where there are both kinds.
_MOST_PARKED_SESSIONS = 4
#: A trial exec may take so long, s.
_TRIAL_S = 60.0
_MODULES = "\nimport sys as _sys\nprint()\nprint(*sorted(_sys.modules))"


def environment(python: str, home: Home, extra: dict[str, str]) -> dict[str, str]:
    """Give a zygote's whole environment: nothing of the daemon's own."""
    return {
        "PATH": f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        # one order of sets and dicts for all sessions: two runs with one seed agree
        "PYTHONHASHSEED": "0",
        # many threads on a shared machine only wait for each other, and a zygote may have but one
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        MARK: home.digest,
        **extra,
    }


def trial_zygote(home: Home) -> Callable[[Fence, Callable[[Zygote], None]], Zygote]:
    """Give what makes the bare zygote of a tier's trial."""

    def make(fence: Fence, on_lost: Callable[[Zygote], None]) -> Zygote:
        return Zygote(sys.executable, _setup(home, fence), environment(sys.executable, home, {}), on_lost)

    return make


def _setup(home: Home, fence: Fence, template: Template | None = None) -> dict[str, Any]:
    limits = template.limits if template else None
    return {
        **fence.setup(),
        "nice": _NICE,
        "root": str(home.root / "root"),
        "read": [*template.path, *template.read] if template else [],
        "path": list(template.path) if template else [],
        "preload": list(template.preload) if template else [],
        "runner": runner_source() if template else "",
        "disk_mib": limits.disk_mib if limits else 16,
        "inodes": limits.inodes if limits else 1000,
    }


class Warm:
    """All templates' nurseries.

    Args:
        templates: By name.
        home: The daemon's directory.
        fence: How sessions are fenced in.
        cgroups: Of the daemon, or None.
        slots: Execs at a time.
    """

    def __init__(
        self, templates: dict[str, Template], home: Home, fence: Fence, cgroups: Cgroups | None, slots: int
    ) -> None:
        self.templates, self._home, self._fence = templates, home, fence
        self._cgroups, self._slots = cgroups, slots
        #: template -> modules that its trial imported although they are not preloaded
        self.not_preloaded: dict[str, list[str]] = {}
        self.nurseries: dict[str, Nursery] = {}

    async def start(self) -> None:
        """Bring every template up to its first session, and grade its trial.

        Raises:
            ConfigError: A template is broken; the line names it.
        """
        numbers = Slots()
        zygotes = min(len(os.sched_getaffinity(0)), self._slots)
        for name, template in self.templates.items():
            self._check_tier(template)
            nursery = Nursery(
                name,
                self._maker(template),
                self._home,
                numbers,
                self._cgroups,
                zygotes=zygotes,
                parked=min(_MOST_PARKED, self._slots),
                parked_sessions=min(_MOST_PARKED_SESSIONS, self._slots),
            )
            self.nurseries[name] = nursery
            try:
                await nursery.start()
                await self._try(template, nursery)
            except (BringupFailed, CellLost) as error:
                raise ConfigError(f"template {name}: expected that it comes up, found: {error}") from error
        for nursery in self.nurseries.values():
            nursery.fill()

    def nursery(self, template_id: str) -> Nursery:
        """Give a template's nursery, by its name or alias."""
        return self.nurseries[ALIASES.get(template_id, template_id)]

    def template(self, template_id: str) -> Template:
        """Give a template, by its name or alias."""
        return self.templates[ALIASES.get(template_id, template_id)]

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for: templates and aliases."""
        return (*self.templates, *(alias for alias, name in ALIASES.items() if name in self.templates))

    def details(self) -> dict[str, dict[str, Any]]:
        """Give what health says of each template."""
        return {
            name: {
                "zygotes": len(nursery.zygotes),
                "parked": nursery.parked,
                "to_park": nursery.to_park,
                "bare_fork_ms": nursery.bare_fork_ms,
                "not_preloaded": self.not_preloaded.get(name, []),
            }
            for name, nursery in self.nurseries.items()
        }

    async def close(self) -> None:
        """End all sessions and zygotes."""
        for nursery in self.nurseries.values():
            await nursery.close()

    def _check_tier(self, template: Template) -> None:
        if template.min_tier is not None and TIERS.index(self._fence.tier) < TIERS.index(template.min_tier):
            raise ConfigError(
                f"template {template.name}: min_tier: expected {template.min_tier!r} or better, "
                f"found that this machine gives {self._fence.tier!r}"
            )

    def _maker(self, template: Template) -> Callable[[Callable[[Zygote], None]], Zygote]:
        python = template.python or sys.executable
        env = environment(python, self._home, template.environment)
        joins = self._cgroups.warm_fds if self._cgroups else ()

        def make(on_lost: Callable[[Zygote], None]) -> Zygote:
            return Zygote(python, _setup(self._home, self._fence, template), env, on_lost, joins)

        return make

    async def _try(self, template: Template, nursery: Nursery) -> None:
        """Run the warm-up grade; note what it imports that the zygote lacks."""
        if not template.warm_up:
            return
        if template.command:
            await self._trial(template, nursery, template.warm_up)
            return
        before = await self._trial(template, nursery, _MODULES)
        after = await self._trial(template, nursery, template.warm_up + _MODULES)
        self.not_preloaded[template.name] = sorted(set(after.split()) - set(before.split()))

    async def _trial(self, template: Template, nursery: Nursery, text: str) -> str:
        """Run trusted code in a session; give the last line of its output."""
        request = ExecRequest("trial", "code", text, "0" * 64, timeout_s=_TRIAL_S)
        cell = await nursery.take(once=not template.command)
        try:
            outcome = await Execution(request, cell, template.command or ()).run()
        finally:
            nursery.retire(cell)
        lines = outcome.output.decode("utf-8", "replace").rstrip("\n").split("\n")
        if outcome.status != "ok":
            raise BringupFailed(f"its warm_up ended with {outcome.status}: {lines[-1][:300]}")
        return lines[-1]
