"""A process of the trainer's keeps its speed beside a saturated daemon (design/DESIGN.md, "Ray").

Measured: loops a second of one process at nice 0, bound to no core and to the processor only, in windows that
alternate between a daemon at rest and one with all slots in use. The figure is the median of the ratios of each
window beside the load to the mean of the two alone around it, so that other work on the machine falls on both.
"""

import itertools
import json
import statistics
import subprocess
import sys
import threading

import pytest
from daemon_harness import Daemon

SLOTS = 8
ROUNDS = 7
WINDOW_S = 1.0
#: For hangs only, s.
LONG_S = 60

SPINNER = """
import sys, time
for line in sys.stdin:
    end, loops = time.monotonic() + float(line), 0
    while time.monotonic() < end:
        for _ in range(1000):
            pass
        loops += 1
    print(loops, flush=True)
"""


@pytest.fixture
def bystander():
    with subprocess.Popen(
        [sys.executable, "-c", SPINNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:

        def speed():
            it.stdin.write(f"{WINDOW_S}\n")
            it.stdin.flush()
            return int(it.stdout.readline()) / WINDOW_S

        yield speed
        it.stdin.close()


class Spinning:
    """Keeps all slots spinning while it is entered."""

    def __init__(self, daemon):
        self.daemon = daemon

    def __enter__(self):
        self.names = [f"spin-{number}" for number in range(SLOTS)]
        body = {"code": "while True: pass", "timeout_seconds": 3600, "limits": {"memory_mib": 64}}
        self.threads = [self.daemon.background(id=name, **body) for name in self.names]
        self.daemon.until(lambda health: health["running"] == SLOTS, "all slots in use", LONG_S)

    def __exit__(self, *_):
        for name in self.names:
            self.daemon.call("DELETE", f"/v1/execs/{name}")
        for thread in self.threads:
            thread.join(LONG_S)
        self.daemon.until(lambda health: health["running"] == 0, "at rest", LONG_S)


class Grading:
    """Keeps all slots busy with short execs while it is entered; a batch costs whoever asks for it next to nothing."""

    def __init__(self, daemon):
        self.daemon = daemon

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()
        self.daemon.until(lambda health: health["running"] == SLOTS, "all slots in use", LONG_S)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(LONG_S)
        self.daemon.until(lambda health: health["running"] == 0, "at rest", LONG_S)

    def _work(self):
        one = {"code": "import time\nwhile time.process_time() < 0.005: pass", "limits": {"memory_mib": 64}}
        while not self.over.is_set():
            connection = self.daemon.connect()
            connection.request("POST", "/v1/exec/batch", json.dumps({"template_id": "python", "execs": [one] * 256}))
            connection.getresponse().read()
            connection.close()


@pytest.mark.parametrize("load", [Spinning, Grading])
def test_bystander_keeps_its_speed(tmp_path, bystander, load):
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=SLOTS, long_s=3600) as daemon:
        alone, beside = [bystander()], []
        for _ in range(ROUNDS):
            with load(daemon):
                beside.append(bystander())
            alone.append(bystander())
        daemon.stop()
    around = [(one + other) / 2 for one, other in itertools.pairwise(alone)]
    ratios = [one / other for one, other in zip(beside, around, strict=True)]
    print("ratios:", *(f"{ratio:.3f}" for ratio in ratios))
    assert statistics.median(ratios) >= 0.8, (alone, beside)
