"""A real daemon as a subprocess, with a stand-in for the runner, and plain HTTP to talk to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

RUNNER = """
import os, sys
def main():
    print("runner", os.getuid(), os.environ.get("COLLIMATE_CANDIDATE_UID"), sys.stdin.read())
"""

PROGRAM = """
import json, sys
import collimate_ray.spec as spec
spec.runner_source, spec.RUNNER_VERSION = (lambda: sys.argv[2]), "test"
from collimate_ray.daemon import DaemonConfig, serve
from collimate_ray.errors import ConfigError
try:
    sys.exit(serve(DaemonConfig(**json.loads(sys.argv[1]))))
except ConfigError as error:
    sys.exit(f"ConfigError: {error}")
"""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout=60):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Daemon:
    """A running daemon; ``ready`` is what it said on stdout."""

    def __init__(self, **config):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps({**config, "json": True}), RUNNER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        if not line:
            self.error = self.process.stderr.read()
            self.wait()
            raise RuntimeError(self.error)
        self.ready = json.loads(line)
        self.first_line = self.process.stderr.readline()
        self.pid = self.ready["pid"]

    def connect(self, timeout=60):
        if "socket" in self.ready:
            return UnixConnection(self.ready["socket"], timeout)
        return http.client.HTTPConnection(self.ready["url"].removeprefix("http://"), timeout=timeout)

    def raw(self):
        """A connected plain socket."""
        connection = self.connect()
        connection.connect()
        return connection.sock

    def call(self, method, path, body=None):
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def run(self, **body):
        status, answer = self.call("POST", "/v1/exec", {"template_id": "python", **body})
        assert status == 200, answer
        return answer

    def background(self, **body):
        """Start an exec; give a thread with ``.answer`` when joined."""

        def work():
            with contextlib.suppress(OSError, http.client.HTTPException):
                thread.answer = self.call("POST", "/v1/exec", {"template_id": "python", **body})

        thread = threading.Thread(target=work)
        thread.answer = None
        thread.start()
        return thread

    def until(self, condition, what, seconds=20):
        """Poll health until it fulfils a condition."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = self.call("GET", "/v1/health")[1]
            if condition(health):
                return health
            time.sleep(0.01)
        raise AssertionError(f"never: {what}; last {health}")

    def signal(self, number=signal.SIGTERM):
        os.kill(self.process.pid, number)

    def wait(self, seconds=30):
        code = self.process.wait(seconds)
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def stop(self):
        if self.process.returncode is None:
            self.signal()
            self.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.signal(signal.SIGINT)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()
                raise


def commands_below(pid):
    """The processes below a daemon that are neither zygotes nor forks of one: what execs started."""
    return {each for each in descendants(pid) if b"_collimate.zygote" not in cmdline(each)}


def cmdline(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as text:
        return text.read() or b"_collimate.zygote"
    return b"_collimate.zygote"  # it is gone


def descendants(pid):
    """All processes below one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def processes_with(text):
    """Processes whose command line holds a text."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as line:
                if text.encode() in line.read():
                    found.append(int(name))
    return found
