"""The Ray cluster of a command: a running one (``--address``), or some raylets started on this machine.

A local cluster is closed to the outside: a temporary directory of its own (short: socket paths end at 107
bytes), a token of its own instead of the one in the user's home, no dashboard. Whatever happens, it and all
processes below it are ended. Must not be imported where Ray is not needed: it costs a third of a second.
Sources: ray.cluster_utils (2.56 to 2.60), notes on Ray's start-up, authentication and shutdown order.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from collimate_ray.cli import family, signals, streams
from collimate_ray.cli.errors import NoCluster

#: Bytes of each raylet's object store: results are small, and Ray's own minimum is 75 MiB.
OBJECT_STORE_BYTES = 80 << 20
#: Seconds that an address may take to accept a connection: Ray itself would try for minutes.
CONNECT_TIMEOUT_S = 5.0
#: Characters that a temporary directory may have: Ray's sockets are 75 further down, and 107 is the end.
_BASE_CHARS = 20
#: What may be wrong at an address that answers: clusters want a token by default (Ray 2.59 and later, the local ones
#: first), while a driver that joins one sends none unless it is told to.
_TOKEN_HINT = (
    "; if the cluster uses token authentication, set RAY_AUTH_MODE=token (and RAY_AUTH_TOKEN_PATH) as its nodes have it"
)
#: The namespace of the design, so that the driver finds the actors by name.
NAMESPACE = "collimate"

_log = logging.getLogger(__name__)


@contextmanager
def local_cluster(nodes: int) -> Iterator[None]:
    """Run a cluster of ``nodes`` raylets on this machine, head included, with this process as a driver.

    Raises:
        NoCluster: It could not be started.
    """
    undo = ExitStack()
    try:
        with signals.undisturbed():
            _prepare(undo)
        _start(nodes)
        yield
    finally:
        with signals.undisturbed():
            undo.close()


def _prepare(undo: ExitStack) -> None:
    """Make the directory and the environment, and note how each is undone, last made first."""
    base = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="cr", dir=base if len(base) <= _BASE_CHARS else "/tmp"))
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    undo.callback(_set_environment, _set_environment(_private_environment(directory)))
    family.become_subreaper()
    undo.callback(family.become_subreaper, False)
    undo.callback(family.end_guard, family.start_guard(f"RAY_TMPDIR={directory}", directory))
    # all raylets at once, without asking Ray, which may have been interrupted half-way
    undo.callback(family.end_all, spared=family.descendants())
    undo.callback(_leave)


def _private_environment(directory: Path) -> dict[str, str | None]:
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_TOKEN": None,
        "RAY_ADDRESS": None,
        "RAY_NAMESPACE": None,
        "RAY_RUNTIME_ENV": None,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray warns of a coming default at import unless this is said
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set (None: unset) variables of this process, which Ray's processes inherit; give the old values."""
    old = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return old


def _start(nodes: int) -> None:
    """Start head, other raylets and driver; between those steps a request to stop is heard.

    Not inside of them: some of Ray's callbacks swallow a KeyboardInterrupt, or print it.
    """
    began = time.monotonic()
    try:
        with signals.undisturbed():
            cluster = _head(nodes)
        for _ in range(nodes - 1):
            with signals.undisturbed():
                cluster.add_node(wait=False, **_node_arguments(nodes))
        with signals.undisturbed():
            cluster.wait_for_nodes()
            _connect(cluster.address)
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        raise NoCluster(f"cannot start a local Ray cluster: {_first_line(error)}") from error
    _log.info("local cluster of %d raylets up in %.1f s", nodes, time.monotonic() - began)


def _head(nodes: int) -> Any:
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    # shutdown_at_exit would move this process to a process group of its own, out of the reach of Ctrl-C
    cluster = Cluster(shutdown_at_exit=False)
    cluster.add_node(wait=False, include_dashboard=False, **_node_arguments(nodes))
    return cluster


def _node_arguments(nodes: int) -> dict[str, Any]:
    return {"num_cpus": max(1, (os.cpu_count() or 1) // nodes), "object_store_memory": OBJECT_STORE_BYTES}


def _connect(address: str) -> None:
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    signals.arm()


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Join the running cluster at ``address`` as a driver.

    Args:
        address: ``host:port``, ``ray://host:port`` or ``auto``.

    Raises:
        NoCluster: There is none.
    """
    answered = _check_answers(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if answered and not address.startswith("ray://"):
            _check_token(address)
        _connect(address)
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        hint = _TOKEN_HINT if answered and "RAY_AUTH_MODE" not in os.environ else ""
        raise NoCluster(f"--address: no Ray cluster at {address}: {_first_line(error)}{hint}") from error
    try:
        yield
    finally:
        with signals.undisturbed():
            _leave()


def _leave() -> None:
    """Disconnect the driver, if it got as far as connecting (and the import of Ray as far as its end)."""
    ray = sys.modules.get("ray")
    if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        ray.shutdown()


def _check_answers(address: str) -> bool:
    """Tell whether the port accepts a connection; False where the address names none.

    Raises:
        NoCluster: It does not.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return False  # "auto" and the like: Ray knows at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise NoCluster(f"--address: no Ray cluster at {address}: {_first_line(error)}") from None
    return True


def _check_token(address: str) -> None:
    """Ask the cluster once; a driver without its token tries for 20 s, and Ray writes a line at each try.

    Not where RAY_AUTH_MODE is set: where its token is not there, Ray ends the process at once, and says so.

    Raises:
        ConnectionError: It refuses, or is no Ray cluster.
    """
    from ray import _raylet
    from ray.exceptions import RayError

    # private, but in all of 2.56 to 2.60; without it Ray's own tries have to do
    client: Any = getattr(_raylet, "GcsClient", None)
    if client is None or "RAY_AUTH_MODE" in os.environ:
        return
    try:
        with signals.undisturbed(), streams.silent_stderr():
            client(address=address)
    except RayError as error:
        raise ConnectionError(_first_line(error).partition(". ")[0]) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
