"""One seed, one run: programs that draw from every source, as code and graded, on a real daemon.

What an answer says of its seed (``seed_ack``, ``seed_pins``) is held against what the programs drew.
"""

import json

import pytest
from daemon_harness import Daemon

from collimate_ray.sandbox import SandboxClient
from collimate_ray.sandbox.grading import grade

#: What draws from each source, by the name of its pin.
DRAWS = {
    "random": "import random; drawn = [random.random(), random.Random().random(), random.sample(range(10**6), 3)]",
    "urandom": "import os; drawn = [os.urandom(8).hex(), os.getrandom(8).hex()]",
    "secrets": "import secrets, random; drawn = [secrets.token_hex(8), random.SystemRandom().random()]",
    "uuid": "import uuid; drawn = [str(uuid.uuid4())]",
    "numpy": "import numpy; drawn = [float(numpy.random.rand()), float(numpy.random.default_rng().random())]",
}
#: Not of the seed, but of all sessions alike: the hashes of texts.
ORDER = "drawn = [list({'ab', 'cd', 'ef', 'gh', 'ij'}), hash('text'), sorted('pqrst', key=hash)]"
SEEDS = ("ab" * 32, "cd" * 32)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    (folder / "templates").mkdir()
    (folder / "templates" / "foreign.toml").write_text('command = ["sh", "{file}"]\n')
    with Daemon(socket=str(folder / "s" / "serve.sock"), slots=2, templates=str(folder / "templates")) as running:
        yield running
        running.stop()


@pytest.fixture(scope="module", params=["python", "numpy"])
def template(request, served):
    if request.param not in served.call("GET", "/v1/health")[1]["templates"]:
        pytest.skip(f"no template {request.param} here")
    return request.param


@pytest.fixture(scope="module")
def sources(served, template):
    """The sources that a template's programs can draw from."""
    has_numpy = served.run(template_id=template, code="import numpy")["status"] == "ok"
    return [name for name in DRAWS if name != "numpy" or has_numpy]


def drawn(served, template, text, seed):
    answer = served.run(template_id=template, code=f"{text}\nimport json; print(json.dumps(drawn))", seed=seed)
    assert answer["status"] == "ok", answer["stdout"]
    assert answer["seed"] == seed
    return answer, json.loads(answer["stdout"])


def test_what_is_said_to_be_pinned_is(served, template, sources):
    for name in sources:
        (first, one), (again, same), (other, different) = (
            drawn(served, template, DRAWS[name], seed) for seed in (*SEEDS[:1] * 2, SEEDS[1])
        )
        for answer in (first, again, other):
            assert (answer["seed_ack"], set(answer["seed_pins"])) == ("verified", set(DRAWS))
        assert one == same, name
        assert all(a != b for a, b in zip(one, different, strict=True)), name


def test_draws_of_one_run_differ(served, template, sources):
    for name in sources:
        text = f"{DRAWS[name]}\nfirst = drawn\n{DRAWS[name]}\ndrawn = [first, drawn]"
        first, second = drawn(served, template, text, SEEDS[0])[1]
        assert all(a != b for a, b in zip(first, second, strict=True)), name


def test_a_run_can_be_repeated_with_the_seed_that_it_was_given(served, template):
    text = "; ".join(f"{DRAWS[name]}; print(drawn)" for name in ("random", "urandom", "secrets", "uuid"))
    first, other = (served.run(template_id=template, code=text) for _ in range(2))
    assert first["stdout"] != other["stdout"]
    assert served.run(template_id=template, code=text, seed=first["seed"])["stdout"] == first["stdout"]


def test_order_of_texts_is_one_for_all(served, template):
    first, *others = (drawn(served, template, ORDER, seed)[1] for seed in (*SEEDS, "0" * 64))
    assert others == [first] * 2


def test_execs_of_a_session_and_of_their_own_agree(served, template, sources):
    name = served.call("POST", "/v1/sessions", {"template_id": template})[1]["session_id"]
    for source in sources:
        alone = drawn(served, template, DRAWS[source], SEEDS[0])[1]
        for _ in range(2):
            body = {"code": f"{DRAWS[source]}\nimport json; print(json.dumps(drawn))", "seed": SEEDS[0]}
            answer = served.call("POST", f"/v1/sessions/{name}/exec", body)[1]
            assert json.loads(answer["stdout"]) == alone
    served.call("DELETE", f"/v1/sessions/{name}")


def test_forked_children_repeat_and_differ_from_each_other(served, template):
    text = (
        "import os, random, uuid\ndef child():\n    read, write = os.pipe()\n    if not os.fork():\n"
        "        os.write(write, repr((random.random(), uuid.uuid4().hex, os.urandom(8).hex())).encode())\n"
        "        os._exit(0)\n    os.wait()\n    return os.read(read, 4096).decode()\n"
        "drawn = [child(), child(), repr((random.random(), uuid.uuid4().hex, os.urandom(8).hex()))]"
    )
    first, again = (drawn(served, template, text, SEEDS[0])[1] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3


def test_what_can_not_be_pinned_is_not_said_to_be(served):
    draw = "od -An -N8 -tx1 /dev/urandom"
    for body in ({"command": draw}, {"commands": [["sh", "-c", draw]]}):
        first, again = (served.run(**body, seed=SEEDS[0]) for _ in range(2))
        assert (first["seed"], first["seed_ack"], first["seed_pins"]) == (SEEDS[0], "off", [])
        assert first["stdout"] != again["stdout"]
    first, again = (served.run(template_id="foreign", code=draw, seed=SEEDS[0]) for _ in range(2))
    assert (first["seed"], first["seed_ack"], first["seed_pins"]) == (SEEDS[0], "no-ack", [])
    assert first["stdout"] != again["stdout"]
    # its own interpreter may seed itself
    assert served.run(command="echo $COLLIMATE_SEED", seed=SEEDS[0])["stdout"] == f"{SEEDS[0]}\n"


SPECS = {
    "unit_tests": {"kind": "unit_tests", "entry": "draw", "tests": [{"input": 1, "expected": ""}] * 2},
    "stdin_stdout": {"kind": "stdin_stdout", "tests": [{"stdin": "", "stdout": ""}] * 2},
}


def graded(client, kind, text, seed):
    """What a candidate drew in each of two cases, as the judge saw it."""
    if kind == "unit_tests":
        indented = text.replace("; ", "\n    ")
        text = f"def draw(_):\n    {indented}\n    return repr(drawn)"
    else:
        text += "; print(drawn)"
    result = grade(client, "python", text, SPECS[kind], seed=seed)
    assert (result.valid, result.seed, len(result.cases)) == (True, seed, 2), result
    return result, [case.got for case in result.cases]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", DRAWS)
def test_graded_candidates_draw_from_their_seed(daemon, kind, name):
    with SandboxClient(unix_socket=daemon.socket) as client:
        if name == "numpy" and client.exec_once("python", code="import numpy")["status"] != "ok":
            pytest.skip("no numpy here")
        first, one = graded(client, kind, DRAWS[name], SEEDS[0])
        _, same = graded(client, kind, DRAWS[name], SEEDS[0])
        _, different = graded(client, kind, DRAWS[name], SEEDS[1])
    assert first.seed_ack == "verified"
    assert set(first.raw["seed_pins"]) == set(DRAWS)
    assert all(one)
    assert one == same
    assert all(a != b for a, b in zip(one, different, strict=True))


@pytest.mark.parametrize("kind", SPECS)
def test_graded_candidates_have_one_order(daemon, kind):
    with SandboxClient(unix_socket=daemon.socket) as client:
        first, again, other = (graded(client, kind, ORDER, seed)[1] for seed in (SEEDS[0], *SEEDS))
    assert all(first)
    assert first == again == other
