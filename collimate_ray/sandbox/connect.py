"""``connect()``: from what the caller and the environment say to a client. Source: design/WIRE.md, "Which transport".

Must not import ``daemon/``: the embedded daemon is another process.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from typing import Any

from collimate_ray.config import Environment, read_environment
from collimate_ray.errors import CollimateRayError, ConfigError
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.sandbox.embedded import PROBE_S, ensure_daemon
from collimate_ray.sandbox.tier import check_tier, checked_tier
from collimate_ray.sandbox.wire import SESSION_SOCKET

log = logging.getLogger(__name__)

#: The embedded daemon of a user without Ray.
LOCAL_KEY = "local"

#: A client's lease on the embedded daemon, s: what a killed process leaves is over after it.
LEASE_S = 60.0

#: A lease is renewed after so long, s: two renewals may be lost.
RENEW_S = 20.0


def connect(
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    unix_socket: str | os.PathLike[str] | None = None,
    require_tier: str | None = None,
    **kwargs: Any,
) -> SandboxClient:
    """Connect to the daemon that the arguments name, else the environment, else this machine.

    In order: ``unix_socket``, ``api_key`` (gateway), ``base_url``, ``$COLLIMATE_SERVE_SOCKET``, ``$COLLIMATE_API_KEY``
    (gateway), ``$COLLIMATE_SERVE_URL``, ``/run/collimate-session/serve.sock`` if it exists, the embedded daemon of
    this user, which is started if it does not run. The embedded one ends by itself 60 s after the last client that
    uses it was closed or its process ended (a lease, renewed by a thread of the client).

    Args:
        base_url: URL of a daemon.
        api_key: Key of the gateway, which this version does not speak.
        unix_socket: Path of a daemon's socket.
        require_tier: Isolation tier that the daemon must have at least (``wire.TIERS``), whichever it is; by default
            ``$COLLIMATE_REQUIRE_TIER``, and without that any.
        **kwargs: Other arguments of ``SandboxClient``.

    Raises:
        ConfigError: An argument or variable is wrong or asks for the gateway, or the daemon's tier is too low.
        SandboxUnavailable: The embedded daemon does not start, or a tier is required and the daemon does not answer.
    """
    environment = read_environment()
    require_tier = checked_tier(require_tier or environment.require_tier)
    client = _client(environment, base_url, api_key, unix_socket, require_tier, kwargs)
    if require_tier is not None:
        try:
            check_tier(client.health(), require_tier, client.address)
        except BaseException:
            client.close()
            raise
    return client


def _client(
    environment: Environment,
    base_url: str | None,
    api_key: str | None,
    unix_socket: str | os.PathLike[str] | None,
    require_tier: str | None,
    kwargs: dict[str, Any],
) -> SandboxClient:
    if unix_socket is not None:
        return SandboxClient(unix_socket=unix_socket, **kwargs)
    if api_key is not None:
        raise _no_gateway("api_key")
    if base_url is not None:
        return SandboxClient(base_url, **kwargs)
    return _from_environment(environment, require_tier, **kwargs)


def _from_environment(environment: Environment, require_tier: str | None, **kwargs: Any) -> SandboxClient:
    if environment.serve_socket:
        return SandboxClient(unix_socket=environment.serve_socket, **kwargs)
    if environment.api_key:
        raise _no_gateway("COLLIMATE_API_KEY")
    if environment.serve_url:
        return SandboxClient(environment.serve_url, **kwargs)
    if os.path.exists(SESSION_SOCKET):
        return SandboxClient(unix_socket=SESSION_SOCKET, **kwargs)
    daemon = ensure_daemon(LOCAL_KEY, slots=environment.slots, require_tier=require_tier)
    return EmbeddedClient(daemon.socket, **kwargs)


def _no_gateway(field: str) -> ConfigError:
    return ConfigError(f"{field}: expected none, since this version does not speak to the gateway yet; found a key")


class EmbeddedClient(SandboxClient):
    """A client that keeps the embedded daemon alive while it is used.

    Args:
        socket_path: The daemon's socket.
        **kwargs: Other arguments of ``SandboxClient``.
    """

    def __init__(self, socket_path: str, **kwargs: Any) -> None:
        super().__init__(unix_socket=socket_path, **kwargs)
        lease = _Lease(socket_path)
        # called once: by close(), when the client is garbage, or at the interpreter's exit
        self._end_lease = weakref.finalize(self, lease.end)

    def close(self) -> None:
        """Give up the lease and close the idle connections."""
        self._end_lease()
        super().close()


class _Lease:
    """A lease on a daemon, renewed by a thread that knows nothing of the client, so that the client can be garbage."""

    def __init__(self, socket_path: str) -> None:
        self._client = SandboxClient(unix_socket=socket_path, timeout=PROBE_S, retries=0)
        self._owner = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self._ended = threading.Event()
        # no renewal may follow the end; re-entrant, since garbage may be collected in the renewing thread
        self._lock = threading.RLock()
        self._renew()
        threading.Thread(target=self._keep, name="collimate-lease", daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            try:
                self._client.drop_owner(self._owner)
            except CollimateRayError as error:
                log.debug("lease %s not dropped: %s", self._owner, error)
            self._client.close()

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            with self._lock:
                if not self._ended.is_set():
                    self._renew()

    def _renew(self) -> None:
        try:
            self._client.renew_owner(self._owner, LEASE_S)
        except CollimateRayError as error:
            # the daemon may be gone; the next call of the client says so to its caller
            log.warning("lease %s not renewed: %s", self._owner, error)
