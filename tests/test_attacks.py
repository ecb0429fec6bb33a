"""Every attack (attacks/) in every tier that this machine can enter, as root and as an ordinary user.

What gets through is listed with the attack, and in the README's table of where a tier ends; what is not listed must be
blocked or bounded. The tier ``rlimits``, which blocks next to nothing, shows that the attacks work.
"""

import base64
import itertools
import re
import uuid
from pathlib import Path

import pytest
from arena import Arena, Session, children
from attacks import calls, files, processes, resources, sockets
from attacks.tools import ATTACKS, BLOCKED, OPEN
from daemon_harness import processes_with
from unprivileged import Ground, unusable

from collimate_ray import connect, grade
from collimate_ray.sandbox.wire import TIERS

MODULES = (files, processes, calls, sockets, resources)
#: Who runs the daemon, the tier, and the age that it takes the kernel's Landlock for.
ARENAS = [
    ("root", "full", None),
    ("root", "full", 5),
    ("root", "userns", None),
    ("root", "landlock", None),
    ("root", "landlock", 5),
    ("root", "landlock", 1),
    ("root", "seccomp", None),
    ("user", "userns", None),
    ("user", "userns", 5),
    ("user", "landlock", None),
    ("user", "landlock", 5),
    ("user", "seccomp", None),
    ("user", "rlimits", None),
]
_NAMES = [f"{user}-{tier}{abi or ''}" for user, tier, abi in ARENAS]


@pytest.fixture(scope="module")
def ground():
    with Ground() as made:
        made.templates = made.root / "t"
        made.templates.mkdir()
        (made.templates / "tiny.toml").write_text("limits = { disk_mib = 8, inodes = 200 }\n")
        yield made


@pytest.fixture(scope="module", params=ARENAS, ids=_NAMES)
def arena(request, ground):
    user, tier, abi = request.param
    why = unusable(ground) if user == "user" else ""
    if why:
        pytest.skip(why)
    try:
        made = Arena(ground, user, tier, abi)
    except RuntimeError as error:  # what the daemon said when it could not enter the tier
        pytest.skip(f"this machine does not give {tier}: {error}")
    try:
        made.prepare()
        yield made
    finally:
        made.stack.close()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_attacks(arena, module):
    wrong = []
    for name, attack in ATTACKS.items():
        if attack.run.__module__ == module.__name__:
            expected, (found, said) = arena.expects(attack), arena.attack(name)
            if found != expected and not (expected == OPEN and arena.may_refuse(attack)):
                wrong.append(f"{name}: expected {expected}, found {found}: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES[:-1], ids=lambda module: module.__name__.rpartition(".")[2])
def test_attacks_of_graded_candidates(arena, module):
    """Candidates are forked and fenced by the runner's keeper, not by the session: nothing more gets through."""
    if arena.tier == "rlimits":
        pytest.skip("what gets through there ends the candidate")
    attacks = [attack for attack in ATTACKS.values() if attack.run.__module__ == module.__name__]
    tests = [{"input": attack.run.__name__, "expected": BLOCKED} for attack in attacks]
    with connect(unix_socket=arena.daemon.ready["socket"]) as client:
        result = grade(client, "python", arena.candidate(module), {"kind": "unit_tests", "tests": tests})
    assert len(result.cases) == len(attacks), result
    told = [(attack, case.got.strip("'\"")) for attack, case in zip(attacks, result.cases, strict=True)]
    unclear = [f"{each.name}: {got}" for each, got in told if not got.startswith((BLOCKED, OPEN, "unseen"))]
    assert not unclear, "\n".join(unclear)
    wrong = [f"{each.name}: {got}" for each, got in told if got.startswith(OPEN) and arena.expects(each) != OPEN]
    assert not wrong, "\n".join(wrong)
    assert arena.sweep() == [] or arena.tier in ("seccomp", "rlimits")


_REMEMBER = """
import os, sys
told = sys.stdin.read()
kept = [open("f").read(), "{secret}", told, os.environ]
print(*kept[:2])
"""
#: Finds secrets in all memory that it has, and one of its own.
_SCAN = """
import ctypes, os, re, sys
own = "hidden-" + "0" * 32
libc = ctypes.CDLL(None)
read, write = os.pipe()

def ranges():
    try:
        lines = [line.split() for line in open("/proc/self/maps")]
        return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[1].startswith("rw")]
    except OSError:  # no /proc: around what is known to lie somewhere
        libc.sbrk.restype = ctypes.c_long
        end = libc.sbrk(0) & -4096
        lie = {{id(each) >> 20 for module in list(sys.modules.values()) for each in vars(module).values()}}
        return [(end - (64 << 20), end), *((at << 20, at + 1 << 20) for at in lie | {{id(own) >> 20}})]

def memory(start, end):
    found = bytearray()
    for page in range(start, end, 4096):
        if libc.write(write, ctypes.c_void_p(page), ctypes.c_size_t(4096)) > 0:
            found += os.read(read, 4096)
    return bytes(found)

print(*sorted({{each.decode() for at in ranges() for each in re.findall(rb"hidden-[0-9a-f]{{32}}", memory(*at))}}))
"""


def test_no_session_finds_what_an_earlier_one_had(arena):
    for how in ("alone", "session"):
        secret = f"hidden-{uuid.uuid4().hex}"
        body = {"code": _REMEMBER.format(secret=secret), "files": [{"path": "f", "content": secret}]}
        body["stdin_b64"] = base64.b64encode(secret.encode()).decode()
        with Session(arena) as session:
            answer = arena.daemon.run(**body) if how == "alone" else session.run(**body)
        assert answer["stdout"].split() == [secret, secret]
    own = "hidden-" + "0" * 32
    for _ in arena.zygotes:  # sessions are forked from each in turn
        assert arena.daemon.run(code=_SCAN.format())["stdout"].split() == [own]
    for pid in arena.zygotes:
        # the second shows that there was something to be found
        assert secrets_in(pid, b"hidden-[0-9a-f]{32}|from _collimate.zygote") <= {b"from _collimate.zygote"}


def secrets_in(pid, pattern):
    """Search all memory of a process."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                found.update(re.findall(pattern, memory.read(end - start)))
    assert found, "nothing was read"
    return found


def test_links_lead_no_file_of_a_request_out(arena):
    spare = Path(arena.facts["spare"])
    spare.write_text(arena.mark)
    runner = "import collimate_runner; collimate_runner.main()"
    with Session(arena) as session:
        for body in ({"command": "true"}, {"code": "pass"}, {"code": runner}):
            session.run(command=f"ln -sfn {spare} planted; ln -sfn {spare.parent} out")
            session.run(files=[{"path": "planted", "content": "planted"}], **body)
            session.run(files=[{"path": "out/new", "content": "planted"}], **body)
    new = spare.with_name("new")
    out = spare.read_text() != arena.mark or new.exists()
    new.unlink(missing_ok=True)
    assert out == (arena.tier in ("seccomp", "rlimits")) or arena.may_refuse(ATTACKS["files.append"])


def test_nothing_that_an_exec_started_outlives_it(arena):
    tag = str(uuid.uuid4().int % 10**9 + 10**9)
    child = f"trap : TERM HUP; (setsid sleep {tag} &); : > s\\$0; sleep {tag}"
    brood = f'rm -f s1 s2; for i in 1 2; do setsid sh -c "{child}" $i & done; until [ -e s1 -a -e s2 ]; do :; done'
    assert arena.daemon.run(command=brood)["status"] == "ok"
    assert processes_with(tag) == []
    with Session(arena) as session:
        session.run(command=brood)
        assert processes_with(tag) == []


_KILL_FIRST = """
import os, signal
first = os.getppid()
for number in [*set(signal.valid_signals()) - {9, 19, signal.SIGUSR1}, signal.SIGUSR1, 19, 9]:
    try: os.kill(first, number)
    except OSError: pass
"""


def test_who_kills_its_own_first_process_hurts_nobody_else(arena):
    with Session(arena) as other, Session(arena) as session:
        status, answer = session.try_run(code=_KILL_FIRST, timeout_seconds=5)
        assert status == 200 or answer["error_code"]
        if arena.facts["namespaces"]:  # elsewhere, if it got through, it would not end here
            status, answer = session.try_run(code="import os; os.kill(-1, 9)", timeout_seconds=5)
            assert status == 200 or answer["error_code"]
        assert other.run(command="echo well")["stdout"] == "well\n"


def test_it_serves_as_before(arena):
    """The last one: all that went before was hostile."""
    assert arena.daemon.process.poll() is None
    assert sorted(arena.zygotes) == sorted(map(int, children(arena.daemon.pid)))
    assert arena.daemon.run(code="print(6 * 7)", seed="ab" * 32)["stdout"] == "42\n"
    assert processes_with(arena.facts["victim_tag"]) == [arena.facts["victim_pid"]]
    health = arena.daemon.call("GET", "/v1/health")[1]
    assert (health["status"], health["running"], health["sessions"]) == ("ok", 1, 1)


def test_what_gets_through_stands_in_the_readme():
    """The tier ``rlimits`` says of itself that it is nothing else."""
    table = readme_table()
    for name, attack in ATTACKS.items():
        for tags in {tags for tags in attack.opened if "rlimits" not in tags}:
            assert attack.row in table, f"{name} gets through ({tags}): expected a row {attack.row!r}"
            named = [tier for tier in TIERS if tier in tags.split("+")]
            cells = [table[attack.row][tier] for tier in named or ["landlock"]]
            assert all("**" in cell for cell in cells), f"{name} gets through ({tags}): {cells}"


def readme_table():
    """Give row -> tier -> cell of the table of where a tier ends."""
    lines = (Path(__file__).parent.parent / "README.md").read_text().split("- **Where a tier ends.**")[1].splitlines()
    lines = itertools.dropwhile(lambda line: line[:1] != "|", lines)
    lines = itertools.takewhile(lambda line: line[:1] == "|", lines)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = {}
    for name, *cells in rows:
        for at, cell in enumerate(cells):
            cells[at] = cells[at - 1] if cell == "as before" else cell
        table[name] = dict(zip([tier.strip("`") for tier in head[1:]], cells, strict=True))
    return table
