"""``kill -9`` during load: every request ends in a typed error or a right result, and the daemon mends itself."""

import hashlib
import http.client
import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from daemon_harness import Daemon, descendants, processes_with

from collimate_ray.daemon.processes import mark_of
from collimate_ray.jail.process import child_pids
from collimate_ray.sandbox.wire import STATUS_OF, ErrorCode

SLOTS = 4
#: For hangs only, s.
LONG_S = 60
#: What a request may be told when its session or its zygote was killed, or when there is no zygote for the moment.
TYPED = {ErrorCode.SESSION_GONE, ErrorCode.ZYGOTE_LOST, ErrorCode.SESSION_BRINGUP_FAILED, ErrorCode.AT_CAPACITY}


@pytest.fixture(scope="module", params=["best", "landlock"])
def tier(request, tmp_path_factory):
    """The best tier, where a session has a pid namespace, and one in which it has none."""
    if request.param == "best":
        return {}
    try:
        with Daemon(socket=str(tmp_path_factory.mktemp("probe") / "s"), slots=1, tier="landlock") as probe:
            probe.stop()
    except RuntimeError as error:
        pytest.skip(str(error))
    return {"tier": "landlock"}


def zygotes(daemon):
    return [pid for pid in child_pids(daemon.pid) if pid != daemon.process.pid]


def inits(daemon):
    return [pid for zygote in zygotes(daemon) for pid in safe_children(zygote) if is_first(pid)]


def is_first(pid):
    """Tell whether a process is its session's first: only where there are pid namespaces, some are not."""
    try:
        numbers = re.search(r"NSpid:(.*)", Path(f"/proc/{pid}/status").read_text())[1].split()
    except OSError:
        return False
    return len(numbers) == 1 or numbers[-1] == "1"


def safe_children(pid):
    try:
        return child_pids(pid)
    except OSError:  # it was killed
        return []


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(pid):
    """A process's start time, which tells it from a later one of its number; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "XZ" else fields[19]


def alive(left):
    """Give those that still live of processes and their start times."""
    return [pid for pid, then in left.items() if then is not None and started(pid) == then]


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def is_whole(health):
    each = health["template_details"].values()
    zygotes = min(SLOTS, len(os.sched_getaffinity(0)))
    at_rest = health["running"] == health["queued"] == 0
    return at_rest and all(one["zygotes"] == zygotes and one["parked"] == one["to_park"] >= SLOTS for one in each)


def read_away(fd):
    """Read what a daemon logs until it ends: one whose log is a full pipe waits for its reader."""
    while os.read(fd, 65536):
        pass
    os.close(fd)


class Load:
    """Threads that run execs of every kind until told to stop, and judge each answer.

    ``told``: how many of each ``error_code``, ``ok`` and ``cut`` (the connection broke) there were. ``wrong``: answers
    that may not be.
    """

    def __init__(self, daemon, threads=2 * SLOTS):
        self.daemon = daemon
        self.told = Counter()
        self.wrong = []
        self.is_killed = False
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]

    def __enter__(self):
        threading.Thread(target=read_away, args=(os.dup(self.daemon.process.stderr.fileno()),)).start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def until(self, condition):
        """Wait until the numbers fulfil a condition."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.told), LONG_S), self.told

    def _work(self, number):
        draw = random.Random(number)
        while not self._over.is_set():
            try:
                draw.choice([self._once, self._batch, self._session])(draw)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._count("cut")
                if not self.is_killed:
                    self.wrong.append(f"the daemon lives, but: {error!r}")
            if self.is_killed:
                return

    def _once(self, draw):
        body, expected = self._program(draw)
        self._judge(*self.daemon.call("POST", "/v1/exec", {"template_id": "python", **body}), expected)

    def _session(self, draw):
        status, made = self.daemon.call("POST", "/v1/sessions", {"template_id": "python"})
        if status != 201:
            self._judge(status, made, None)
            return
        path = f"/v1/sessions/{made['session_id']}"
        is_gone = False
        for _ in range(4):
            body, expected = self._program(draw)
            status, answer = self.daemon.call("POST", f"{path}/exec", body)
            self._judge(status, answer, expected)
            if is_gone and status == 200:
                self.wrong.append("a session that was gone ran an exec")
            is_gone = is_gone or answer.get("error_code") in (ErrorCode.SESSION_GONE, ErrorCode.ZYGOTE_LOST)
        if self.daemon.call("DELETE", path)[1]["deleted"] and is_gone:
            self.wrong.append("a session that was gone was there to delete")

    def _batch(self, draw):
        programs = [self._program(draw) for _ in range(6)]
        connection = self.daemon.connect()
        try:
            execs = {"template_id": "python", "execs": [body for body, _ in programs]}
            connection.request("POST", "/v1/exec/batch", json.dumps(execs))
            lines = [json.loads(line) for line in connection.getresponse().read().splitlines()]
        finally:
            connection.close()
        for line in lines:
            self._judge(line["http_status"], line, programs[line["index"]][1])
        if sorted(line["index"] for line in lines) != list(range(6)):
            self.wrong.append(f"a batch without all its lines: {lines}")

    @staticmethod
    def _program(draw):
        """Give an exec that takes a few ms, and its output: longer than a pipe holds, so that it comes in parts."""
        word = f"{draw.getrandbits(64):x}"
        digest = hashlib.sha256(word.encode()).hexdigest()
        if draw.random() < 0.2:
            return {"command": f"printf {word} | sha256sum | cut -c 1-64"}, f"{digest}\n"
        text = f"import hashlib\nd = hashlib.sha256({word.encode()!r}).hexdigest()\nfor _ in range(40): print(d * 40)"
        return {"code": text}, f"{digest * 40}\n" * 40

    def _judge(self, status, answer, expected):
        if status == 200:
            self._count("ok")
            if (answer["status"], answer["stdout"]) != ("ok", expected):
                self.wrong.append(f"{answer['status']}, {len(answer['stdout'])} characters: {answer['stdout'][-80:]!r}")
            return
        code = answer.get("error_code")
        self._count(code)
        if code == ErrorCode.SESSION_BRINGUP_FAILED:
            self._over.wait(0.02)  # the next zygote has to start, on the same cores
        if code not in TYPED or status != STATUS_OF[code]:
            self.wrong.append(f"{status} {answer}")

    def _count(self, what):
        with self._changed:
            self.told[what] += 1
            self._changed.notify_all()


def test_killed_zygotes_and_sessions_during_load(tmp_path, tier):
    draw = random.Random(7)
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=SLOTS, **tier) as daemon:
        daemon.until(is_whole, "whole", LONG_S)
        with Load(daemon) as load:
            for round_number in range(24):
                before = load.told["ok"]
                victims = zygotes(daemon) if round_number % 6 == 5 else inits(daemon)
                for victim in draw.sample(victims, min(2, len(victims))):
                    kill(victim)
                load.until(lambda told, before=before: told["ok"] >= before + 4)  # it serves again
            # parked ones die as often as busy ones; sooner or later each kind of loss is met by an exec
            end = time.monotonic() + LONG_S
            while not (load.told[ErrorCode.SESSION_GONE] and load.told[ErrorCode.ZYGOTE_LOST]):
                assert time.monotonic() < end, load.told
                before = load.told["ok"]
                for victim in [*inits(daemon), *zygotes(daemon)[:1]]:
                    kill(victim)
                load.until(lambda told, before=before: told["ok"] >= before + 4)
        assert load.wrong == []
        assert daemon.until(is_whole, "whole again", LONG_S)["sessions"] == 0
        assert daemon.run(command="echo hi")["stdout"] == "hi\n"
        daemon.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("victim", "code"), [("init", ErrorCode.SESSION_GONE), ("zygote", ErrorCode.ZYGOTE_LOST)])
def test_exec_whose_host_is_killed_says_which(tmp_path, tier, victim, code):
    tag = f"{uuid.uuid4()}"
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=SLOTS, **tier) as daemon:
        daemon.until(is_whole, "whole", LONG_S)
        name = daemon.call("POST", "/v1/sessions", {"template_id": "python"})[1]["session_id"]
        path = f"/v1/sessions/{name}"
        answers = []

        def work():
            answers.append(daemon.call("POST", f"{path}/exec", {"command": f"sleep 600; : {tag}"}))

        thread = threading.Thread(target=work)
        thread.start()
        daemon.until(lambda health: processes_with(tag), "running", LONG_S)
        process = min(processes_with(tag))
        init = parent(process)
        kill(init if victim == "init" else parent(init))
        thread.join(LONG_S)
        assert [(status, answer["error_code"]) for status, answer in answers] == [(STATUS_OF[code], code)]
        for method, route, body in (("POST", f"{path}/exec", {"command": "true"}), ("GET", path, None)):
            status, answer = daemon.call(method, route, body)
            assert (status, answer["error_code"]) == (410, ErrorCode.SESSION_GONE)
        assert daemon.call("DELETE", path)[1]["deleted"] is False
        daemon.until(lambda health: is_whole(health) and not processes_with(tag), "whole again", LONG_S)
        daemon.stop()


@pytest.mark.parametrize("victim", ["init", "zygote"])
def test_idle_session_whose_host_was_killed_is_gone(tmp_path, tier, victim):
    tag = f"{uuid.uuid4()}"
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=1, **tier) as daemon:
        name = daemon.call("POST", "/v1/sessions", {"template_id": "python"})[1]["session_id"]
        path = f"/v1/sessions/{name}/exec"
        body = {"command": f"until [ -e go ]; do sleep 0.05; done; : {tag}"}
        thread = threading.Thread(target=daemon.call, args=("POST", path, body))
        thread.start()
        daemon.until(lambda health: processes_with(tag), "running", LONG_S)
        process = min(processes_with(tag))
        init = parent(process)
        zygote = parent(init)
        Path(f"/proc/{process}/cwd/go").touch()
        thread.join(LONG_S)
        kill(init if victim == "init" else zygote)
        daemon.until(lambda health: started(init) is None, "dead", LONG_S)
        told = [daemon.call("POST", path, {"command": "true"})[1]["error_code"] for _ in range(2)]
        # the first to find it is told whose death it was
        assert told == [ErrorCode.SESSION_GONE if victim == "init" else ErrorCode.ZYGOTE_LOST, ErrorCode.SESSION_GONE]
        daemon.stop()


def cgroup_dirs(mark):
    tops = [Path(top) for top, _, _ in os.walk("/sys/fs/cgroup") if os.path.basename(top) == f"collimate-{mark}"]
    return {int(path.name) for top in tops for path in top.iterdir() if path.is_dir() and path.name != "warm"}


def mounts():
    return Path("/proc/mounts").read_text().splitlines()


def test_killed_daemon_is_swept_by_the_next_on_its_socket(tmp_path, tier):
    many = 40  # sessions that live when it is killed, and have directories and cgroups
    socket = tmp_path / "d" / "serve.sock"
    mounted = mounts()
    with Daemon(socket=str(socket), slots=SLOTS, **tier) as daemon:
        daemon.until(is_whole, "whole", LONG_S)
        mark = mark_of(zygotes(daemon)[0])
        for _ in range(many):
            assert daemon.call("POST", "/v1/sessions", {"template_id": "python"})[0] == 201
        with Load(daemon) as load:
            load.until(lambda told: told["ok"] >= 20)
            left = {pid: started(pid) for pid in descendants(daemon.pid)}
            load.is_killed = True
            daemon.signal(signal.SIGKILL)
            daemon.wait()
        assert load.wrong == []
        assert load.told["cut"] > 0
        assert socket.exists()
        has_cgroups = bool(cgroup_dirs(mark))
        assert not has_cgroups or max(cgroup_dirs(mark)) >= many
    with Daemon(socket=str(socket), slots=SLOTS, **tier) as again:
        again.until(is_whole, "whole", LONG_S)
        # in a container, those that outlived their parents are reaped when its first process comes to it
        again.until(lambda health: not alive(left), "nothing of the dead one lives", LONG_S)
        assert mark_of(zygotes(again)[0]) == mark
        assert bool(cgroup_dirs(mark)) == has_cgroups
        assert all(number < many for number in cgroup_dirs(mark))
        assert mounts() == mounted
        assert again.call("GET", "/v1/sessions")[1] == []
        assert again.run(command="echo hi")["stdout"] == "hi\n"
        again.stop()
    assert not cgroup_dirs(mark)
    assert list(socket.parent.iterdir()) == []
