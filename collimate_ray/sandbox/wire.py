"""Words, numbers and shapes of the node-local wire, which both sides import. Source: design/WIRE.md.

Must not do anything: no sockets, no retries, no sessions. The client (``sandbox/client.py``) and the embedded
daemon (``daemon/``) agree because they read the same page.
"""

from __future__ import annotations

from typing import Final


class ErrorCode:
    """The ``error_code`` of an error body."""

    DRAINING: Final = "draining"
    AT_CAPACITY: Final = "at_capacity"
    SESSION_BRINGUP_FAILED: Final = "session_bringup_failed"
    NO_TEMPLATE: Final = "no_template"
    TEMPLATE_ID_REQUIRED: Final = "template_id_required"
    BAD_REQUEST: Final = "bad_request"
    INVALID_SEED: Final = "invalid_seed"
    NO_SUCH_SESSION: Final = "no_such_session"
    SESSION_GONE: Final = "session_gone"
    NOT_FOUND: Final = "not_found"
    NO_SUCH_EXEC: Final = "no_such_exec"
    #: the host of the exec's session died: it may have run, and the session is not to blame
    ZYGOTE_LOST: Final = "zygote_lost"
    #: for the admin socket only
    FORBIDDEN: Final = "forbidden"
    #: stopped when the deadline of its batch passed
    DEADLINE: Final = "deadline"
    CANCELLED: Final = "cancelled"
    #: the daemon itself failed: no descriptor, no disk
    INTERNAL: Final = "internal"


#: HTTP status of each error code.
STATUS_OF: Final[dict[str, int]] = {
    ErrorCode.DRAINING: 503,
    ErrorCode.AT_CAPACITY: 503,
    ErrorCode.SESSION_BRINGUP_FAILED: 503,
    ErrorCode.NO_TEMPLATE: 404,
    ErrorCode.TEMPLATE_ID_REQUIRED: 400,
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.INVALID_SEED: 400,
    ErrorCode.NO_SUCH_SESSION: 404,
    ErrorCode.SESSION_GONE: 410,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.NO_SUCH_EXEC: 404,
    ErrorCode.ZYGOTE_LOST: 502,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.DEADLINE: 504,
    # nginx's number for "the client went away", the nearest there is
    ErrorCode.CANCELLED: 499,
    ErrorCode.INTERNAL: 500,
}

#: A POST refused with one of these left nothing behind, so it may be sent again.
SAFE_TO_REPEAT: Final = frozenset({ErrorCode.DRAINING, ErrorCode.AT_CAPACITY, ErrorCode.SESSION_BRINGUP_FAILED})

#: Largest ``timeout_seconds`` of an exec, s.
MAX_TIMEOUT_S: Final = 3600

#: ``timeout_seconds`` of an exec that does not say, s.
DEFAULT_TIMEOUT_S: Final = 30

#: Output kept of one exec, bytes (16 MiB).
MAX_OUTPUT_BYTES: Final = 16 << 20

#: Most execs of one batch (feature ``exec-batch``).
MAX_BATCH: Final = 256

#: Longest deadline of a batch, s: a day.
MAX_BATCH_S: Final = 86_400.0

#: Where a Collimate node mounts the session socket for its workers.
SESSION_SOCKET: Final = "/run/collimate-session/serve.sock"

#: Keys of ExecRequest ``limits`` (feature ``limits``); meanings and defaults: design/API.md.
LIMIT_NAMES: Final = ("time_s", "wall_time_s", "memory_mib", "output_mib", "processes", "files", "file_mib")

#: The ``code`` that calls the preloaded runner (feature ``runner``).
RUNNER_CALL: Final = "import collimate_runner; collimate_runner.main()"

#: Longest path that a unix socket can be bound to, bytes (``sun_path`` is 108 with its final NUL).
MAX_SOCKET_PATH_BYTES: Final = 107

#: Tiers of isolation of the embedded daemon, weakest first (design: DESIGN.md and notes/SANDBOX.md).
TIERS: Final = ("rlimits", "seccomp", "landlock", "userns", "full")
