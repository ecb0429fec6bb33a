"""Which fence this machine allows, found by trying: what a trial exec got is what health reports.

Must not promise anything untried. Modes, best first:

* ``mounts``: root with CAP_SYS_ADMIN: a uid, a private ``/tmp`` and private IPC for each session;
* ``uid``: root without it: a uid for each session;
* ``caps``: root whose interpreter no other uid can read: uid 0 stays, every capability goes;
* ``plain``: not root.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace

from collimate_ray.daemon.execution import Execution
from collimate_ray.daemon.home import Home, remove_tree
from collimate_ray.daemon.outcome import BringupFailed, ExecRequest
from collimate_ray.daemon.processes import Family
from collimate_ray.errors import ConfigError

_log = logging.getLogger(__name__)

#: What every mode gives: enforced for each exec by ``boot.py`` and ``execution.py``.
_ALWAYS = ("process-group", "private-directory", "rlimits", "no-new-privs")
_EXTRA = {
    "mounts": ("own-uid", "no-capabilities", "private-tmp", "private-ipc"),
    "uid": ("own-uid", "no-capabilities"),
    "caps": ("no-capabilities",),
    "plain": (),
}
#: The trial imports from the standard library, writes to its directories, and tells who it is.
_TRIAL = ExecRequest(
    exec_id="trial",
    kind="code",
    seed="0" * 64,
    text="import decimal, os, tempfile\n"
    "with tempfile.NamedTemporaryFile(dir='.'), tempfile.NamedTemporaryFile(): print(os.getuid(), os.geteuid())",
)


async def choose_mode(home: Home, keep: list[str], family: Family) -> tuple[str, ...]:
    """Set the best mode that works here.

    Args:
        home: The daemon's directory.
        keep: Directories that an exec must be able to read.
        family: The daemon's running execs.

    Returns:
        Short names of what is in force.

    Raises:
        ConfigError: No exec works at all.
    """
    reason = ""
    for mode in ("mounts", "uid", "caps") if os.getuid() == 0 else ("plain",):
        home.set_mode(mode)
        reason = await _trial(home, keep, family)
        if not reason:
            return _ALWAYS + _EXTRA[mode]
        _log.warning("isolation mode %s does not work here, sessions are less apart: %s", mode, reason)
    raise ConfigError(f"serve: expected that an exec can run here, found: {reason}")


async def _trial(home: Home, keep: list[str], family: Family) -> str:
    """Run the trial; give "" or why it failed."""
    uid = home.first_uid if home.own_uids else None
    place = home.make_place(f"trial-{home.mode}", uid)
    execution = Execution(replace(_TRIAL), home, place, uid, f"{home.digest}.0", keep, family)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, execution.on_exit)
    try:
        outcome = await execution.run()
    except BringupFailed as error:
        return str(error)
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
        remove_tree(place.top)
    expected = os.getuid() if uid is None else uid
    said = outcome.output.decode("utf-8", "replace").strip()
    return "" if said == f"{expected} {expected}" else f"the trial said {said[-300:]!r}"
