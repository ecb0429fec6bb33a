"""The embedded node-local daemon: the control-plane wire on one machine, an exec a process.

Must not import Ray or the grader. Source: design/WIRE.md. ``serve`` blocks.
"""

from collimate_ray.daemon.server import serve
from collimate_ray.daemon.settings import DaemonConfig

__all__ = ["DaemonConfig", "serve"]
