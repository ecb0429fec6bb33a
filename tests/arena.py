"""Where attacks take place: a daemon in one tier, and what stands outside of an attacker's session."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from attacks import calls
from attacks.tools import ATTACKS, BLOCKED, BOUNDED, OPEN
from daemon_harness import processes_with
from unprivileged import SECRET, UID, RealDaemon, python_of

SOURCES = Path(calls.__file__).parent
#: The longest that anything may take that must not hang, s.
_PATIENCE_S = 60


class Arena:
    """A daemon, and what stands outside of an attacker's session: another session, processes, files and sockets.

    Args:
        ground: Where there is room for it.
        user, tier, abi: One of ``ARENAS``.
    """

    def __init__(self, ground, user, tier, abi):
        self.user, self.tier, self.ground = user, tier, ground
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.stack = contextlib.ExitStack()
        self.daemon = self.stack.enter_context(self._serve(tier, abi))
        health = self.daemon.call("GET", "/v1/health")[1]
        self.parts = health["isolation"]
        self.zygotes = self._zygotes()
        self.tags = self._tags(abi)

    def _serve(self, tier, abi):
        config = {"tier": tier, "allow_unsafe": True, "max_landlock_abi": abi, "slots": 2, "memory_mib": 4096}
        config["templates"] = str(self.ground.templates)
        if self.user == "user":
            return RealDaemon(python_of(self.ground), socket=self.ground.socket, **config)
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="d"))
        return RealDaemon([sys.executable], socket=f"{folder}/d/serve.sock", **config)

    def _zygotes(self):
        return [int(pid) for pid in children(self.daemon.pid)]

    def _tags(self, abi):
        parts = " ".join(self.parts)
        tags = {self.user, self.tier, f"landlock{abi}" if abi else "landlock-now"}
        tags |= {"no-cgroups"} if "cgroup" not in parts else set()
        counted = {"own-uid", "user-ns"} & set(self.parts)
        tags |= {"no-count"} if "no-cgroups" in tags and not counted else set()
        return tags

    def may_refuse(self, attack):
        """Tell whether what is listed as open may be blocked: by another user's rights, or by the kernel as it is."""
        other_user = "own-uid" in self.parts and "pid-ns" not in self.parts
        return other_user or (self.tier == "rlimits" and attack.row == calls.KERNEL)

    def expects(self, attack):
        """Give what is listed of an attack here."""
        is_open = any(set(tags.split("+")) <= self.tags for tags in attack.opened)
        return OPEN if is_open else attack.expected

    def prepare(self):
        """Put outside what attackers are after."""
        folder = self.ground.root / f"a{uuid.uuid4().hex[:6]}"
        folder.mkdir()
        own = (UID, UID) if self.user == "user" else (os.getuid(), os.getgid())
        for name in ("file", "spare"):
            (folder / name).write_text(self.mark)
            os.chown(folder / name, *own)
        os.chown(folder, *own)
        leaf = f"attack-{uuid.uuid4().hex[:8]}"
        self.leaves = [str(folder / leaf), f"/tmp/{leaf}", f"/var/tmp/{leaf}", f"/dev/shm/{leaf}"]
        self.facts = {
            "mark": self.mark,
            "environment": SECRET,
            "file": str(folder / "file"),
            "spare": str(folder / "spare"),
            "leaf": self.leaves[0],
            "leaves": self.leaves[1:],
            "socket": self.daemon.ready["socket"],
            "ours": [self.daemon.pid, *self.zygotes],
            "pipes": 0,
            "root": self.user == "root",
            "namespaces": "pid-ns" in self.parts,
            "scoped": "landlock-now" in self.tags and any(part.startswith("landlock-") for part in self.parts),
            "bystander": self._bystander(),
            **self._listeners(folder, own),
            **self._victim(),
        }

    def _bystander(self):
        user = {"user": UID, "group": UID, "extra_groups": []} if self.user == "user" else {}
        process = subprocess.Popen(["sleep", "600"], start_new_session=True, **user)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process.pid

    def _listeners(self, folder, own):
        name = f"attacked-{uuid.uuid4().hex[:8]}"
        kinds = {
            "port": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "unix_path": (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "s")),
            "unix_name": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}"),
            "datagram_path": (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "g")),
            "datagram_name": (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{name}-g"),
        }
        found = {}
        for fact, (family, kind, address) in kinds.items():
            sock = self.stack.enter_context(socket.socket(family, kind))
            sock.bind(address)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            if family == socket.AF_UNIX and not address.startswith("\0"):
                os.chown(address, *own)
            found[fact] = sock.getsockname()[1] if fact == "port" else address.removeprefix("\0")
        return found

    def _victim(self):
        """Start another session that holds files, sockets, and a secret in its memory and environment."""
        session = Session(self)
        self.stack.callback(session.close)
        name, tag = f"victim-{uuid.uuid4().hex[:8]}", str(uuid.uuid4().int % 10**9 + 10**9)
        work, tmp = session.run(code="import os; print(os.getcwd(), os.environ['TMPDIR'])")["stdout"].split()
        code = _VICTIM.format(mark=self.mark, name=name, tag=tag)
        thread = threading.Thread(target=session.try_run, kwargs={"code": code, "timeout_seconds": 3600})
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(session.close)
        pids = until(lambda: processes_with(tag), "the other session lives")
        return {
            "victim_work": work,
            "victim_tmp": tmp,
            "victim_name": name,
            "victim_tag": tag,
            "victim_pid": pids[0],
        }

    def attack(self, name):
        """Let one loose; give how it went and what it said."""
        attack = ATTACKS[name]
        module = name.partition(".")[0]
        wanted = ("__init__", "tools", module)
        sources = [{"path": f"attacks/{each}.py", "content": (SOURCES / f"{each}.py").read_text()} for each in wanted]
        call = f"tools.judge({name!r}, json.loads({json.dumps(self.facts)!r}))"
        code = f"import json\nfrom attacks import tools, {module}\n{call}"
        answer = self.daemon.run(code=code, files=sources, **attack.body)
        left = self.sweep()
        return (OPEN, f"it left {left}") if left else self._verdict(answer)

    def candidate(self, module):
        """Give attacks as a candidate that lets one loose for each case."""
        tools = (SOURCES / "tools.py").read_text()
        own = re.sub(r"(?m)^from \.tools import (\([^)]*\)|.*)$", "", Path(module.__file__).read_text())
        call = _CANDIDATE.format(facts=json.dumps({**self.facts, "pipes": 2}))
        return f"{tools}\n{own}\n{call}"

    def sweep(self):
        """Remove what attacks left outside; give it."""
        left = [path for path in self.leaves if os.path.lexists(path)]
        for path in left:
            (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
        return left

    def _verdict(self, answer):
        if answer["status"] in ("memory", "output", "timeout"):
            return BOUNDED, answer["status"]
        verdict = answer["stdout"].rstrip("\n").rpartition("\n")[2]
        assert verdict.startswith("["), answer
        said = json.loads(verdict)
        return (BLOCKED if said[0] == "unseen" else said[0]), said[1]


_CANDIDATE = """
def solve(name):
    facts = json.loads({facts!r})
    attack = next(each for each in ATTACKS.values() if each.run.__name__ == name)
    return " ".join(tried(attack.run, facts))
"""
_VICTIM = """
import contextlib, os, socket
for place in (".", os.environ["TMPDIR"]):
    with open(os.path.join(place, "victims"), "w") as target:
        target.write("{mark}")
for address in ("\\0{name}", os.path.abspath("victims.sock")):
    with contextlib.suppress(OSError):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        os.dup(listener.fileno())
        os.set_inheritable(os.dup(listener.fileno()), True)
os.execvpe("sleep", ["sleep", "{tag}"], {{**os.environ, "SECRET": "{mark}"}})
"""


class Session:
    """A session of an arena's daemon."""

    def __init__(self, arena, template="python"):
        self._daemon = arena.daemon
        status, answer = self._daemon.call("POST", "/v1/sessions", {"template_id": template})
        assert status == 201, answer
        self._path = f"/v1/sessions/{answer['session_id']}"

    def try_run(self, **body):
        return self._daemon.call("POST", f"{self._path}/exec", body)

    def run(self, **body):
        status, answer = self.try_run(**body)
        assert status == 200, answer
        return answer

    def close(self):
        self._daemon.call("DELETE", self._path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def until(condition, what):
    """Wait for something that must come; give it."""
    end = time.monotonic() + _PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)
    return found
