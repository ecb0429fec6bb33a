"""The daemon of one node, as its NodeGrader sees it: found, started, tended, given up. Blocking, Ray-free.

Must not run on an event loop. Source: design, Ray ("The daemon is not the actor's child") and WIRE.md ("Which
transport").
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from collimate_ray.config import read_environment
from collimate_ray.errors import CollimateRayError, ConfigError, SandboxUnavailable
from collimate_ray.messages import GraderConfig
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.sandbox.connect import connect
from collimate_ray.sandbox.embedded import Daemon, ensure_daemon, stop_daemon
from collimate_ray.sandbox.tier import check_tier
from collimate_ray.sandbox.wire import SESSION_SOCKET

logger = logging.getLogger(__name__)

#: Lease of the node actor on its daemon, s; renewed by every ``tend``.
LEASE_S = 60


class NodeDaemon:
    """A client of the node's daemon, and the daemon itself where it is the embedded one.

    Args:
        config: How the grader was started.
        node_id: Ray's node id; names the embedded daemon.
        slots: Execs in flight that the embedded daemon admits, at least 1.
        owner: Name of the lease.
    """

    def __init__(self, config: GraderConfig, node_id: str, slots: int, owner: str) -> None:
        self._config = config
        self._node_id = node_id
        self._slots = slots
        self._owner = owner
        self._embedded = config.daemon == "embedded" or (config.daemon == "auto" and not _configured())
        self._require_tier = config.require_tier or read_environment().require_tier
        self._daemon: Daemon | None = None
        self._client: SandboxClient | None = None
        self._features: frozenset[str] = frozenset()
        self._tier = ""
        #: pids of embedded daemons that we started
        self._started: set[int] = set()

    @property
    def client(self) -> SandboxClient:
        """The client; only after ``open``."""
        if self._client is None:
            raise SandboxUnavailable("the node's daemon is not open", self._node_id)
        return self._client

    @property
    def features(self) -> frozenset[str]:
        """What the daemon advertised when it was opened."""
        return self._features

    @property
    def ours(self) -> bool:
        """Whether it is an embedded daemon that we started."""
        return self._daemon is not None and self._daemon.pid in self._started

    def describe(self) -> dict[str, Any]:
        """Give the daemon's fields of ``NodeState``."""
        pid = self._daemon.pid if self._daemon else 0
        where = self._daemon.socket if self._daemon else self._config.daemon
        return {"daemon": where, "daemon_pid": pid, "daemon_ours": self.ours, "tier": self._tier}

    def open(self) -> None:
        """Find or start the daemon, and check it; may take 15 s.

        Raises:
            SandboxUnavailable: It does not answer or can't be started.
            ConfigError: Its tier or templates are not what was asked for.
        """
        if self._client is None:
            self._client = self._connect()
        health = self._health()
        self._features = frozenset(health.get("features", ()))
        self._tier = str(health.get("tier", ""))
        self._check(health)

    def tend(self) -> bool:
        """Look after the daemon: renew the lease, start the embedded one anew if it is gone.

        Returns:
            True if it drains.

        Raises:
            CollimateRayError: It does not answer.
        """
        health = self._health()
        draining = health.get("status") == "draining"
        if "owner" in self._features and not draining:
            self.client.renew_owner(self._owner, LEASE_S)
        return draining

    def close(self, stop: bool) -> None:
        """Give up the lease and the connection.

        Args:
            stop: End the embedded daemon as well.
        """
        try:
            if stop and self._daemon is not None:
                stop_daemon(self._daemon)
            elif "owner" in self._features:
                self.client.drop_owner(self._owner)
        except CollimateRayError as error:
            logger.debug("node %s: daemon not released: %s", self._node_id, error)
        if self._client is not None:
            self._client.close()

    def _connect(self) -> SandboxClient:
        where = self._config.daemon
        if self._embedded:
            return SandboxClient(unix_socket=self._start().socket)
        if where == "auto":
            return connect(require_tier=self._require_tier)
        return SandboxClient(where) if "://" in where else SandboxClient(unix_socket=where)

    def _health(self) -> dict[str, Any]:
        """Ask the daemon how it is; the embedded one is started anew if it is gone."""
        try:
            return self.client.health()
        except SandboxUnavailable:
            if not self._embedded:
                raise
            self._start()
            return self.client.health()

    def _start(self) -> Daemon:
        daemon = ensure_daemon(
            self._node_id,
            slots=self._slots,
            memory_mib=self._config.memory_mib,
            require_tier=self._require_tier,
        )
        if daemon.started:
            self._started.add(daemon.pid)
        self._daemon = daemon
        return daemon

    def _check(self, health: Mapping[str, Any]) -> None:
        check_tier(health, self._require_tier, self.client.address)
        templates = health.get("templates", ())
        if self._config.template not in templates:
            raise ConfigError(
                f"template: expected one of {', '.join(map(str, templates))}, found {self._config.template!r}"
            )


def _configured() -> bool:
    """Tell whether this node's environment names a daemon, so that ``connect()`` needs no embedded one."""
    env = read_environment()
    return bool(env.serve_socket or env.api_key or env.serve_url or os.path.exists(SESSION_SOCKET))
