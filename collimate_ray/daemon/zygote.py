"""One zygote process as the daemon sees it: start it, order sessions, hear of their ends.

Must not see a request: those go to sessions (``cell.py``). Source: notes/SANDBOX.md, section 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collimate_ray import jail
from collimate_ray.daemon.outcome import BringupFailed
from collimate_ray.jail import kernel

_log = logging.getLogger(__name__)

#: The directory of the programs that run inside: read by the template's interpreter, nothing else of ours is.
_JAIL_DIR = Path(jail.__file__).parent
#: Loads that directory as a package under a name that no other has.
_BOOT = """
import importlib.util, sys
root, control, setup = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_collimate", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["_collimate"] = importlib.util.module_from_spec(spec)
from _collimate.zygote import main
main(int(control), int(setup))
"""
#: The longest start of a zygote, s: an import of a large package on a loaded machine.
_START_S = 120.0
#: Bytes of what a zygote said that are kept for the error.
_SAID = 8192


@dataclass(frozen=True)
class Forked:
    """A session that was forked.

    Attributes:
        pid: As the daemon sees it: of its first process, or of its only exec if that has none above it.
        pidfd: A descriptor of its first process.
        fork_ms: How long the fork took, ms.
    """

    pid: int
    pidfd: int
    fork_ms: float


class Zygote:
    """One zygote.

    Args:
        python: Its interpreter.
        setup: What ``jail/zygote.py`` reads.
        environment: Its whole environment, and its sessions'.
        on_lost: Called once when it died by itself.
        joins: Files of cgroups that it joins.
    """

    def __init__(
        self,
        python: str,
        setup: dict[str, Any],
        environment: dict[str, str],
        on_lost: Callable[[Zygote], None],
        joins: Sequence[int] = (),
    ) -> None:
        self._python, self._setup, self._environment, self._on_lost = python, setup, environment, on_lost
        self._joins = tuple(joins)
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._forks: dict[int, asyncio.Future[Forked]] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._on_result: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._said = bytearray()
        self._closing = False
        self.lost = False
        self.pid = 0
        #: what it said of itself when it was ready
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    async def start(self) -> None:
        """Start it and wait until it is warm.

        Raises:
            BringupFailed: It ended, or took too long; with the last line that it said.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        setup_fd = memory_file(json.dumps({**self._setup, "parent": os.getpid(), "joins": self._joins}).encode("ascii"))
        self._talk, talk_write = os.pipe()
        os.set_blocking(self._talk, False)
        command = [self._python, "-s", "-B", "-X", "utf8", "-c", _BOOT, str(_JAIL_DIR)]
        try:
            # pipes on all three streams: Python remembers of a stream whether it can seek
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(setup_fd)],
                stdin=subprocess.PIPE,
                stdout=talk_write,
                stderr=talk_write,
                cwd="/",
                env=self._environment,
                pass_fds=(theirs.fileno(), setup_fd, *self._joins),
                start_new_session=True,
            )
        except OSError as error:
            self._forget()
            raise BringupFailed(f"{self._python} can't be started: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(setup_fd)
            os.close(talk_write)
        self.pid = self._process.pid
        self._loop.add_reader(self._control, self._on_message)
        self._loop.add_reader(self._talk, self._on_talk)
        try:
            await asyncio.wait_for(asyncio.shield(self.ready), _START_S)
        except asyncio.TimeoutError:
            self.close()
            raise BringupFailed(f"a zygote was not warm within {_START_S:g} s") from None
        if self.lost:  # between its word and here: nobody knew it, so nobody was told
            raise BringupFailed(f"the zygote ended when it was warm: {self.tail()}")

    async def fork(self, order: dict[str, Any], fds: Sequence[int]) -> tuple[int, Forked]:
        """Order a session.

        Args:
            order: What ``jail/session.py`` reads.
            fds: Descriptors for it; the caller closes its own.

        Returns:
            Its number, for ``ended``, and what was forked.

        Raises:
            BringupFailed: The zygote could not fork, or is gone.
        """
        number = next(self._numbers)
        self._forks[number] = self._loop.create_future()
        self._ends[number] = self._loop.create_future()
        try:
            kernel.send(self._control, {"fork": number, **order}, fds)
            return number, await self._forks[number]
        except OSError as error:
            self._ends.pop(number, None)
            raise BringupFailed(f"the zygote is gone: {error.strerror}") from error
        except BringupFailed:
            self._ends.pop(number, None)
            raise
        finally:
            self._forks.pop(number, None)

    def when_ended(self, number: int, on_result: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Call back with how a session's only exec ended, and when nothing of it lives or the zygote is gone."""
        self._on_result[number] = on_result
        self._ends[number].add_done_callback(lambda _: on_end())

    async def ended(self, number: int) -> None:
        """Wait until nothing of a session lives, and forget it."""
        future = self._ends.get(number)
        if future is not None:
            await asyncio.shield(future)
            self._ends.pop(number, None)
            self._on_result.pop(number, None)

    def is_lost(self) -> bool:
        """Tell whether it died, even if the loop has not noticed yet."""
        if self.lost:
            return True
        # not by its socket, which processes that share its descriptors hold a little longer
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def close(self) -> None:
        """End it; its sessions end with it."""
        self._closing = True
        self._lose()

    def _on_message(self) -> None:
        try:
            message, fds = kernel.receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            message, fds = None, []
        if message is None:
            self._lose()
        elif "ready" in message:
            self.ready.set_result(message)
        elif "forked" in message:
            self._on_forked(message, fds)
        elif "failed" in message:
            self._settle(self._forks.get(message["failed"]), BringupFailed(message["error"]))
        elif "result" in message:
            if message["result"] in self._on_result:
                self._on_result[message["result"]](message)
        elif message["gone"] in self._ends and not self._ends[message["gone"]].done():
            self._ends[message["gone"]].set_result(None)

    def _on_forked(self, message: dict[str, Any], fds: list[int]) -> None:
        future = self._forks.get(message["forked"])
        if future is None or future.done():  # nobody waits for it any more
            os.close(fds[0])
            return
        future.set_result(Forked(message["pid"], fds[0], message["ms"]))

    @staticmethod
    def _settle(future: asyncio.Future[Any] | None, error: Exception) -> None:
        if future is not None and not future.done():
            future.set_exception(error)

    def _on_talk(self) -> None:
        try:
            said = os.read(self._talk, 65536)
        except BlockingIOError:
            return
        self._said = (self._said + said)[-_SAID:]
        if not said:
            self._loop.remove_reader(self._talk)

    def _lose(self) -> None:
        """It is gone: everybody who waits for it hears so."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control)
        self._on_talk()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        status = self._process.wait()
        error = BringupFailed(f"the zygote ended ({_how(status)}): {self.tail()}")
        self._settle(self.ready, error)
        for future in self._forks.values():
            self._settle(future, error)
        self.ready.exception()  # looked at: it may have no other reader
        for ending in self._ends.values():
            if not ending.done():
                ending.set_result(None)
        self._forget()
        if not self._closing:
            self._on_lost(self)

    def _forget(self) -> None:
        self._loop.remove_reader(self._talk)
        self._control.close()
        os.close(self._talk)
        if self.pid and self._process.stdin is not None:
            self._process.stdin.close()

    def tail(self) -> str:
        """Give the last line that it, or a session of it that had not begun, said."""
        lines = [line for line in self._said.decode("utf-8", "replace").split("\n") if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit {status}"


def memory_file(content: bytes) -> int:
    """Give a descriptor of a file in memory that holds ``content``, at its beginning."""
    handle = os.memfd_create("collimate")
    with open(handle, "wb", closefd=False) as target:
        target.write(content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
