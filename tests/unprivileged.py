"""A daemon of an ordinary user: Debian's own python, and copies of what that user could not read elsewhere."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy
from daemon_harness import Daemon

import collimate_ray

UID = 12345
SECRET = "secret-of-the-daemon"
_PYTHON = "/usr/bin/python3"
_PROGRAM = """
import json, sys
from collimate_ray.daemon import DaemonConfig, serve
sys.exit(serve(DaemonConfig(**json.loads(sys.argv[1]))))
"""


class Ground:
    """Directories of that user, gone after ``with``: ``socket`` is where a daemon may serve."""

    def __enter__(self):
        self.root = Path(tempfile.mkdtemp(prefix="ca", dir="/tmp"))
        self.root.chmod(0o755)
        self.packages, self.own = self.root / "p", self.root / "o"
        copy_packages(self.packages)
        self.own.mkdir(mode=0o700)
        os.chown(self.own, UID, UID)
        self.socket = str(self.own / "d" / "serve.sock")
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.root)


def copy_packages(target):
    """Copy our package and numpy to where everybody may read them."""
    package = Path(numpy.__file__).parent
    for source in (Path(collimate_ray.__file__).parent, package, package.with_name("numpy.libs")):
        if source.exists():
            shutil.copytree(source, target / source.name, ignore=shutil.ignore_patterns("tests", "*.pyi"))


def python_of(ground):
    """Give what runs Python as that user."""
    user = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    environment = ["env", "-i", "PATH=/usr/bin:/bin", f"PYTHONPATH={ground.packages}", f"TMPDIR={ground.own}"]
    return [*user, *environment, f"SECRET={SECRET}", _PYTHON]


def unusable(ground):
    """Give why that user can't run a daemon here, or ""."""
    if os.geteuid() != 0:
        return "only root becomes another user"
    if not (shutil.which("setpriv") and os.path.exists(_PYTHON)):
        return f"there is no setpriv, or no {_PYTHON}"
    trial = subprocess.run([*python_of(ground), "-c", "import numpy"], capture_output=True, text=True, timeout=60)
    return "" if trial.returncode == 0 else f"{_PYTHON} can't load this numpy: {trial.stderr[-200:]}"


class RealDaemon(Daemon):
    """A daemon as users run it, runner and all, with a secret in its environment.

    Args:
        python: What runs Python.
        config: Of ``DaemonConfig``.
    """

    def __init__(self, python, **config):
        self.process = subprocess.Popen(
            [*python, "-c", _PROGRAM, json.dumps({**config, "json": True})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "SECRET": SECRET},
            text=True,
        )
        line = self.process.stdout.readline()
        if not line:
            error = self.process.stderr.read()
            self.wait()
            raise RuntimeError(error)
        self.ready = json.loads(line)
        self.first_line = self.process.stderr.readline()
        self.pid = self.ready["pid"]
