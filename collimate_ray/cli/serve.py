"""``collimate-ray serve``: the embedded daemon in the foreground. Must hold no logic of the daemon."""

from __future__ import annotations

import argparse

from collimate_ray.cli.errors import InputError
from collimate_ray.config import read_environment


def run_serve(args: argparse.Namespace) -> int:
    """Run ``collimate-ray serve`` until it is told to stop.

    Returns:
        The daemon's exit code.

    Raises:
        ConfigError: An option is wrong, or the socket is served already.
    """
    from collimate_ray.daemon import DaemonConfig, serve

    if (args.socket is None) == (args.port is None):
        raise InputError(["serve: expected either --socket PATH or --port N"])
    if args.socket is not None and args.host is not None:
        raise InputError(["--host: expected only with --port, found it with --socket"])
    environment = read_environment()
    given = {
        "slots": args.slots or environment.slots,
        "memory_mib": args.memory_mib,
        "linger_s": args.linger_s,
        "templates": args.templates,
        "tier": args.tier,
        "require_tier": args.require_tier or environment.require_tier,
        "max_landlock_abi": environment.max_landlock_abi,
        "allow_unsafe": args.allow_unsafe,
        "verbose": args.verbose,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    host = args.host or ("127.0.0.1" if args.port is not None else None)
    return serve(DaemonConfig(socket=args.socket, host=host, port=args.port, json=args.json, **chosen))
