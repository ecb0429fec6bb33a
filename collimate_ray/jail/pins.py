"""Seed pins: every ordinary source of random numbers of an interpreter, set to go on from one seed.

For honest code that wants its runs repeated; no defence against a program that looks elsewhere (``/dev/urandom``, its
pid, the clock, a name that a preloaded module took from ``os`` before). Joined as text into the runner's source, so:
standard library only, Python 3.8+, top-level definitions only. Sources: the texts of CPython's ``random``, ``secrets``
and ``uuid``, and numpy's ``bit_generator.pyx``: all but ``random``'s own seeding draw through ``os.urandom`` as
``os`` or ``random`` name it, which is replaced here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import sys
from typing import Any, Optional

#: Bytes that seed a generator: as many as CPython's own takes into account in practice.
_SEED_BYTES = 32


class _Stream:
    """Bytes that only a key decides: SHAKE-256 of the key and a running number.

    A forked child goes on with a key of its own, which its place among its parent's children decides: two processes
    that got the same bytes would give the same name to different files.
    """

    def __init__(self, key: bytes) -> None:
        self._start(key)

    def _start(self, key: bytes) -> None:
        self._key = key
        self._drawn = itertools.count()
        self._forks = 0

    def draw(self, size: int) -> bytes:
        """Give the next bytes; threads may draw at once."""
        return hashlib.shake_256(b"%s %d" % (self._key, next(self._drawn))).digest(size)

    def number(self) -> int:
        """Give a seed for a generator."""
        return int.from_bytes(self.draw(_SEED_BYTES), "big")

    def forking(self) -> None:
        """Before a fork: number it."""
        self._forks += 1

    def forked(self) -> None:
        """In the child: take a key of its own. ``random`` was just seeded by a hook of its own: seed it again."""
        self._start(hashlib.sha256(b"%s fork %d" % (self._key, self._forks)).digest())
        random.seed(self.number())


def pin(seed: str) -> list[str]:
    """Make this process's sources of random numbers, and its forked children's, go on from a seed.

    Covered: ``random`` (unseeded ``Random()`` too), ``SystemRandom``, ``secrets``, ``uuid4``, ``os.urandom``,
    ``os.getrandom``, numpy's legacy generator and its ``default_rng()`` without arguments, imported before or after.

    Args:
        seed: 64 hex characters.

    Returns:
        What is pinned, as seed pins are named on the wire.
    """
    stream = _Stream(bytes.fromhex(seed))
    _replace_urandom(stream)
    _replace_seeding(stream)
    os.register_at_fork(before=stream.forking, after_in_child=stream.forked)
    random.seed(int(seed, 16))
    loaded = sys.modules.get("numpy.random")
    if loaded is not None:
        loaded.seed(int(seed[:8], 16))
    # numpy draws through ``secrets``, which draws through this private name: without it neither would be pinned
    through = hasattr(random, "_urandom")
    return ["random", "numpy", "urandom", "secrets", "uuid"] if through else ["random", "urandom", "uuid"]


def _replace_urandom(stream: _Stream) -> None:
    def urandom(size: int, /) -> bytes:
        return stream.draw(size)

    def getrandom(size: int, flags: int = 0) -> bytes:
        return stream.draw(size)

    for each in (urandom, getrandom):  # pickled by name, like the functions that they stand for
        each.__module__, each.__qualname__ = "os", each.__name__
    os.__dict__.update(urandom=urandom, getrandom=getrandom)
    random.__dict__.update(_urandom=urandom)


def _replace_seeding(stream: _Stream) -> None:
    """Give each ``random`` generator that is seeded with nothing a seed of the stream's."""
    original = random.Random.seed

    @functools.wraps(original)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, stream.number() if a is None else a, version)

    random.Random.seed = seed  # type: ignore[method-assign]
    _bind_again()


def _bind_again() -> None:
    """Let ``random.seed`` be the new method: it was bound when the module was made."""
    generator: Optional[random.Random] = getattr(random.seed, "__self__", None)
    if generator is not None:
        random.__dict__.update(seed=generator.seed)
