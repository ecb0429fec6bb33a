"""The exception tree: whose fault it was, and whether a verdict exists. Imports nothing.

::

    CollimateRayError
      ConfigError (ValueError)       the call is wrong; never retried
      SpecError (ValueError)         the spec or ground truth is wrong; never retried
        CheckerError                 the spec's own code failed: no reward, never retried
      InfraError                     no verdict was produced; .node_id .admitted .retriable
        SandboxUnavailable           the daemon, or the road to it, is not there
        SandboxDraining              refused before admission: going down for an upgrade
        SandboxAtCapacity            refused before admission: no slot
        SessionLost                  this session broke while its daemon answers
        WireError                    the daemon's answer makes no sense
        NodeLost                     the node or its actor died
        Poison                       three hosts died under this candidate
        GroupFailed                  budget or deadline spent, or cancelled; .partial
      GraderClosed                   the grader is not (or no longer) there

Every class takes positional arguments only, with defaults: an exception crosses processes as ``(class, args)``.
"""

from __future__ import annotations

from typing import Any

#: Characters of a value that an error's text shows.
_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Give a value as an error's text shows it: its repr, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


class CollimateRayError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(CollimateRayError, ValueError):
    """The call is wrong: an argument, an option, an environment variable, an input file."""


class SpecError(CollimateRayError, ValueError):
    """The spec or the ground truth is wrong."""


class CheckerError(SpecError):
    """The spec's own code (reference, generator, test code, checker) failed: there is no reward."""


class GraderClosed(CollimateRayError):
    """The grader is not there, or went away; submit again after ``start()``."""


class InfraError(CollimateRayError):
    """No verdict was produced. Never a reward.

    Args:
        message: What happened, for people.
        node_id: The node it happened on, or None.
        admitted: True if the work may have begun; False if it was refused before anything ran.
        retriable: True if the same grade may be tried again.
    """

    #: What an instance that does not say has. Under other names: Ray raises a class of both its own error and this one,
    #: which finds the instance's attributes only where the class has none of that name.
    _admitted = True
    _retriable = True

    def __init__(
        self,
        message: str = "",
        node_id: str | None = None,
        admitted: bool | None = None,
        retriable: bool | None = None,
    ) -> None:
        super().__init__(message, node_id, admitted, retriable)
        self.message = message
        self.node_id = node_id
        self.admitted = self._admitted if admitted is None else admitted
        self.retriable = self._retriable if retriable is None else retriable

    def __str__(self) -> str:
        return self.message if self.node_id is None else f"{self.message} (node {self.node_id[:12]})"


class SandboxUnavailable(InfraError):
    """Connection refused, reset or timed out: the daemon is not there."""


class SandboxDraining(InfraError):
    """503 ``draining``: refused before admission; better elsewhere."""

    _admitted = False


class SandboxAtCapacity(InfraError):
    """503 ``at_capacity`` (or ``session_bringup_failed``): refused before anything ran."""

    _admitted = False


class SessionLost(InfraError):
    """The session's own processes or channel broke while its daemon answers."""


class WireError(InfraError):
    """The daemon answered something that is not the wire."""


class NodeLost(InfraError):
    """The node, its actor or the link to it died."""


class Poison(InfraError):
    """An index under which three hosts died; it is not dispatched again."""

    _retriable = False


class GroupFailed(InfraError):
    """A group's deadline or budget is spent, it was cancelled, or a member has no verdict.

    Args:
        message: What happened, for people.
        node_id: The node of the first failure, or None.
        admitted: See ``InfraError``.
        retriable: See ``InfraError``.
        partial: The ``GroupResult`` as far as it got (members without a verdict are not valid), or None.
    """

    def __init__(
        self,
        message: str = "",
        node_id: str | None = None,
        admitted: bool | None = None,
        retriable: bool | None = None,
        partial: Any = None,
    ) -> None:
        super().__init__(message, node_id, admitted, retriable)
        self.args = (message, node_id, admitted, retriable, partial)
        self.partial = partial
