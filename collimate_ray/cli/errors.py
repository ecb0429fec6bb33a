"""Exit codes of the command line, and the errors that carry them. Must not print. Source: design API."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from collimate_ray.errors import CollimateRayError, ConfigError

#: Lines of trouble shown at once: more scroll the first ones off a terminal.
SHOWN_ERRORS = 10


class Exit(enum.IntEnum):
    """Exit codes of every subcommand."""

    DONE = 0
    NO_VERDICT = 1
    BAD_INPUT = 2
    NO_CLUSTER = 3
    INTERRUPTED = 130


class InputError(ConfigError):
    """An input file, an output path or an option is wrong.

    Args:
        problems: One line each: place, field, what was found, what was expected.
    """

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        shown = list(self.problems[:SHOWN_ERRORS])
        if len(self.problems) > SHOWN_ERRORS:
            shown.append(f"... and {len(self.problems) - SHOWN_ERRORS} more")
        return "\n".join(shown)


class UsageError(ConfigError):
    """The command line is not one.

    Args:
        program: The command as typed, ``collimate-ray grade``.
        problem: One line: option, what was expected, what was found.
    """

    def __init__(self, program: str = "", problem: str = "") -> None:
        super().__init__(program, problem)

    def __str__(self) -> str:
        program, problem = self.args
        return f"{program}: {problem}\nsee '{program} --help'"


class NoCluster(CollimateRayError):
    """No Ray cluster, grader or daemon is there, or it went away."""


class OutputLost(CollimateRayError):
    """The output file can't be written any more (disk full, file system gone)."""
