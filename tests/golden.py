"""Graded candidates of the project's own, each with the verdict it must get: spec, code, verdict, reward, evidence."""

from __future__ import annotations

from typing import Any, NamedTuple


class Golden(NamedTuple):
    spec: dict[str, Any]
    code: str
    verdict: str
    reward: float
    evidence: str = ""


FAST = {"time_s": 2, "memory_mib": 256}
CUBES = {
    "kind": "unit_tests",
    "entry": "cube",
    "limits": FAST,
    "tests": [{"input": [n], "expected": n**3} for n in (2, -3, 0, 10)],
}
PARTLY = {**CUBES, "scoring": "fraction"}
ADDER = {
    "kind": "stdin_stdout",
    "limits": FAST,
    "tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "-1 1\n", "stdout": "0\n"}],
}
SORTED = {
    "kind": "property",
    "limits": FAST,
    "k": 12,
    "reference": "def reference(items):\n    items.sort()\n    return items\n",
    "generator": "def generate(rng):\n    return [[rng.randint(0, 9) for _ in range(rng.randint(2, 8))]]\n",
}
SDK_PROPERTY = {
    "kind": "property",
    "limits": FAST,
    "reference": "    return x * 2",
    "generator": "random.randint(1, 1000)",
}


def asserting(test_code: str, entry: str, **more: Any) -> dict[str, Any]:
    return {"kind": "assert_tests", "test_code": test_code, "entry": entry, "limits": FAST, **more}


QUEUE_TEST = """
q = Queue()
q.push(1); q.push("b")
assert len(q) == 2
assert q.pop() == 1
assert [x for x in q] == ["b"]
try:
    Queue().pop()
except IndexError:
    pass
else:
    assert False
"""
TWICE = asserting("def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == [1, 1]\n", "twice")
EQUALS_ALL = "class E:\n    __eq__ = lambda a, b: True\n    __ne__ = lambda a, b: False\n    __hash__ = lambda a: 1\n"

STANDARD_IMPORTS = (
    "from collections import Counter, OrderedDict, defaultdict, deque\nfrom datetime import date\n"
    "from decimal import Decimal as D\nfrom fractions import Fraction\n"
)
STANDARD_TEST = (
    STANDARD_IMPORTS
    + """
made = make()
assert made[:4] == [D("1.5"), Fraction(1, 3), date(2024, 2, 29), deque([1])]
assert made[4:] == [Counter("aab"), {"a": 1}, {"a": [1]}, range(3), b"x"]
assert [type(v) for v in made] == [D, Fraction, date, deque, Counter, OrderedDict, defaultdict, range, bytearray]
assert made[4].most_common(1) == [("a", 2)] and made[6]["new"] == [] and made[3].maxlen == 3
for value in made:
    assert f(value) == value and type(f(value)) is type(value)
"""
)
FORGER = """
class X:
    def __sub__(self, other): return X()
    __rsub__ = __sub__
    __abs__ = __float__ = lambda self: 0.0
    __pow__ = lambda self, n: self
    __len__ = lambda self: 0
    __bool__ = lambda self: False
"""
FIND_PEER = """
import gc
def peer():
    return next(x for x in gc.get_objects() if type(x).__name__ == 'Peer')
"""
NODE = "class Node:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next\n"

GOLDEN: dict[str, Golden] = {
    # functions
    "cube right": Golden(CUBES, "def cube(n): return n ** 3", "passed", 1.0),
    "cube as method": Golden(CUBES, "class Solution:\n    def cube(self, n): return n * n * n", "passed", 1.0),
    "cube chatty": Golden(CUBES, "print('{}')\ndef cube(n):\n    print(n)\n    return n ** 3", "passed", 1.0),
    "cube by spawned processes": Golden(
        {**CUBES, "limits": {"time_s": 20}},
        "import multiprocessing\ndef one(n): return n ** 3\ndef cube(n):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(one, [n])[0]",
        "passed",
        1.0,
    ),
    "cube wrong": Golden(CUBES, "def cube(n): return n * 3", "failed", 0.0),
    "cube partly": Golden(PARTLY, "def cube(n): return n ** 3 if n > 0 else 1", "failed", 0.5),
    "cube as text": Golden(CUBES, "def cube(n): return str(n ** 3)", "failed", 0.0),
    "cube raises": Golden(PARTLY, "def cube(n):\n    if n < 0: raise ValueError\n    return n ** 3", "crashed", 0.75),
    "cube unnamed": Golden(CUBES, "def kube(n): return n ** 3", "crashed", 0.0),
    "cube syntax": Golden(CUBES, "def cube(n) return", "crashed", 0.0),
    "cube nul": Golden(CUBES, "def cube(n): return 0\n\0", "crashed", 0.0),
    "cube surrogate": Golden(CUBES, "# \ud800\ndef cube(n): return n ** 3", "crashed", 0.0),
    "cube blank": Golden(CUBES, "  \n", "no_code", 0.0),
    "cube loops once": Golden(PARTLY, "def cube(n):\n    while n == -3: pass\n    return n ** 3", "timeout", 0.75),
    "cube sleeps": Golden(CUBES, "import time\ndef cube(n):\n    time.sleep(9)\n    return n ** 3", "timeout", 0.0),
    "cube loops at load": Golden(CUBES, "while True: pass", "timeout", 0.0),
    "cube eats memory": Golden(CUBES, "def cube(n): return len(bytearray(1 << 34))", "memory", 0.0),
    "cube segfault": Golden(CUBES, "import os\ndef cube(n): os.kill(os.getpid(), 11)", "signaled", 0.0),
    "cube recursion": Golden(CUBES, "def cube(n): return cube(n)", "crashed", 0.0),
    "cube endless iterator": Golden(CUBES, "import itertools\ndef cube(n): return itertools.count()", "failed", 0.0),
    "cube exits": Golden(CUBES, "import os\ndef cube(n): os._exit(0)", "crashed", 0.0, "early_exit"),
    "cube sys.exit": Golden(CUBES, "import sys\ndef cube(n): sys.exit(0)", "crashed", 0.0),
    "cube equals all": Golden(CUBES, EQUALS_ALL + "def cube(n): return E()", "failed", 0.0),
    "cube sprays": Golden(
        CUBES,
        "import os\ndef cube(n):\n    for fd in range(64):\n        try: os.write(fd, b'\\0\\0\\0\\2{}' * 9)\n"
        "        except OSError: pass\n    return 1",
        "crashed",
        0.0,
        "protocol_bytes",
    ),
    "cube answers twice": Golden(
        CUBES,
        "import os, json, struct\ndef cube(n):\n    for i in range(2, 9):\n"
        "        m = json.dumps({'a': 8, 're': i}).encode()\n        os.write(4, struct.pack('>I', len(m)) + m)\n"
        "    os._exit(0)",
        "crashed",
        0.0,
        "protocol_bytes",
    ),
    "cube as a number that overflows": Golden(CUBES, "def cube(n): return complex(1.7e308, 1.7e308)", "failed", 0.0),
    "cube as a dict with a default": Golden(
        {**CUBES, "tests": [{"input": [1], "expected": {"1": 2}}]},
        "from collections import defaultdict\ndef cube(n):\n    d = defaultdict(lambda: 0)\n    d[n] = 2\n    return d",
        "passed",
        1.0,
    ),
    "cube waits by others": Golden(
        {**CUBES, "limits": {"time_s": 1, "wall_time_s": 30}},
        "import os, time\ndef cube(n):\n    for _ in range(5):\n        if os.fork() == 0:\n            os.nice(9)\n"
        "            while 1: pass\n    end = time.process_time() + 6\n    while time.process_time() < end: pass\n"
        "    return n ** 3",
        "timeout",
        0.0,
    ),
    "cube closes all": Golden(CUBES, "import os\nos.closerange(0, 99)\ndef cube(n): return 1", "crashed", 0.0),
    "cube hangs up": Golden(
        CUBES, "import os, time\nos.closerange(3, 99)\ntime.sleep(99)", "crashed", 0.0, "closed_channel"
    ),
    "cube breaks modules": Golden(
        CUBES,
        "import sys, builtins\nfor m in list(sys.modules): sys.modules[m] = None\nsys.stdout = None\n"
        "builtins.len = lambda x: 3\ndef cube(n): return n ** 3 + 1",
        "crashed",
        0.0,
    ),
    # programs
    "adder right": Golden(ADDER, "print(sum(map(int, input().split())))", "passed", 1.0),
    "adder binary": Golden(
        ADDER,
        "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.read().split())))",
        "passed",
        1.0,
    ),
    "adder /dev/stdin": Golden(ADDER, "print(sum(map(int, open('/dev/stdin').read().split())))", "passed", 1.0),
    "adder thread and atexit": Golden(
        ADDER,
        "import atexit, threading\na = sum(map(int, input().split()))\natexit.register(print)\n"
        "threading.Thread(target=print, args=(a,)).start()",
        "passed",
        1.0,
    ),
    "adder wrong": Golden(ADDER, "print(5)", "failed", 0.0),
    "adder with a prelude": Golden(
        {**ADDER, "prelude": "import math"},
        "from __future__ import annotations\nprint(math.floor(sum(map(int, input().split()))))",
        "passed",
        1.0,
    ),
    "adder by little": Golden(
        ADDER, "import time\nwhile True:\n    print(1, flush=True)\n    time.sleep(.01)", "timeout", 0.0
    ),
    "adder says its prelude failed": Golden(ADDER, "import os\nos.write(3, b'P')\nexit(1)", "crashed", 0.0),
    "adder silent": Golden(ADDER, "", "no_code", 0.0),
    "adder says nothing": Golden(ADDER, "pass", "failed", 0.0),
    "adder exit status": Golden(ADDER, "print(sum(map(int, input().split()))); exit(3)", "crashed", 0.0),
    "adder raises": Golden(ADDER, "print(5); 1/0", "crashed", 0.0),
    "adder floods": Golden(ADDER, "while True: print('x' * 9999)", "output_limit", 0.0),
    "adder eats memory": Golden(ADDER, "x = []\nwhile True: x.append(bytearray(1 << 24))", "memory", 0.0),
    "adder deaf loop": Golden(
        ADDER, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "timeout", 0.0
    ),
    "adder leaves a child": Golden(
        ADDER,
        "import os, time\nprint(sum(map(int, input().split())), flush=True)\nif os.fork() == 0:\n"
        "    os.setsid(); time.sleep(600)",
        "passed",
        1.0,
    ),
    "adder late child": Golden(
        ADDER, "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1); print('5\\n0')", "failed", 0.0
    ),
    # properties
    "sort right": Golden(SORTED, "solve = sorted", "passed", 1.0),
    "sort in place": Golden(SORTED, "def solve(items):\n    items.sort()\n    return items", "passed", 1.0),
    "sort wrong": Golden(SORTED, "def solve(items): return items", "failed", 0.0),
    "sort empties": Golden(SORTED, "def solve(items):\n    items.clear()\n    return []", "failed", 0.0),
    "double right": Golden(SDK_PROPERTY, "def solve(x): return x + x", "passed", 1.0),
    "double wrong": Golden(SDK_PROPERTY, "def solve(x): return 2", "failed", 0.0),
    # asserts
    "twice right": Golden(TWICE, "def twice(x): return x + x", "passed", 1.0),
    "twice wrong": Golden(TWICE, "def twice(x): return [x]", "failed", 0.0),
    "twice exits": Golden(TWICE, "import os\ndef twice(x): os._exit(0)", "crashed", 0.0, "early_exit"),
    "twice equals all": Golden(TWICE, EQUALS_ALL + "def twice(x): return E()", "failed", 0.0),
    "tuple is no list": Golden(
        asserting("assert pair(1) == (1, 1)\nassert type(pair(1)) is tuple", "pair"),
        "def pair(x): return [x, x]",
        "failed",
        0.0,
    ),
    "swallowed break": Golden(
        asserting("try:\n    boom(1)\nexcept:\n    pass\n", "boom"),
        "import os\ndef boom(x): os._exit(0)",
        "crashed",
        0.0,
    ),
    "queue class": Golden(
        asserting(QUEUE_TEST, "Queue"),
        "import collections\nclass Queue(collections.deque):\n    def push(self, x): self.append(x)\n"
        "    def pop(self): return self.popleft()\n",
        "passed",
        1.0,
    ),
    "own builtins": Golden(
        asserting("assert len(both(1, 2)) == 2\nassert sorted(both(2, 1)) == [1, 2]", "both"),
        "def len(x): return 99\nsorted = None\ndef both(a, b): return [a, b]",
        "passed",
        1.0,
    ),
    "free names": Golden(
        asserting("assert helper(3) == twice(3) == LIMIT", "twice", prelude="LIMIT = 6"),
        "def helper(x): return LIMIT\ndef twice(x): return x * 2",
        "passed",
        1.0,
    ),
    "prelude wins": Golden(
        asserting("assert truth() == 1 and f() == 1", "f", prelude="def truth(): return 1"),
        "def truth(): return 2\ndef f(): return truth()",
        "failed",
        0.0,
    ),
    "mutated argument": Golden(
        asserting("a = {'k': [1]}\nf(a)\nassert a == {'k': [1, 2]}", "f"),
        "def f(a): a['k'].append(2)",
        "passed",
        1.0,
    ),
    "callable argument": Golden(
        asserting("assert f(lambda v: v + 1, 0) == 2\nassert f(str.upper, 'a') == 'A'", "f"),
        "def f(g, v): return g(g(v))",
        "passed",
        1.0,
    ),
    "range argument": Golden(
        asserting("assert f(range(3)) == [0, 1, 2]\nassert f(x for x in 'ab') == ['a', 'b']", "f"),
        "def f(items): return list(items)",
        "passed",
        1.0,
    ),
    "generator": Golden(
        asserting("g = f(2)\nassert next(g) == 2\nassert list(g) == [1]", "f"),
        "def f(n):\n    while n:\n        yield n\n        n -= 1",
        "passed",
        1.0,
    ),
    "argument is no window": Golden(
        asserting("secret = 41\nassert f(lambda: secret) == 7", "f"),
        "def f(g):\n    try: return g.__globals__['secret']\n    except AttributeError: return 7",
        "passed",
        1.0,
    ),
    "shared process": Golden(
        asserting("class Sub(Base): pass\nassert Sub().x == 3", "Base", isolation="shared"),
        "class Base: x = 3",
        "passed",
        1.0,
    ),
    "builtin type called in the keeper": Golden(
        asserting("assert f(3) == 9", "f"),
        FIND_PEER + "def f(x):\n    X = peer().call(type, ('X', (object,), {'__eq__': type}), {})\n"
        "    return peer().call(X, (), {})",
        "crashed",
        0.0,
    ),
    "handle of nothing": Golden(
        asserting("assert f(3) == 9", "f"),
        "import os, json, struct\ndef f(x):\n    m = json.dumps({'q': 1, 'op': 'call', 'on': {'$': 'type', 'v': 'set'},"
        " 'args': []}).encode()\n    os.write(4, struct.pack('>I', len(m)) + m)\n    return 9",
        "crashed",
        0.0,
        "protocol_bytes",
    ),
    "order by objects": Golden(
        asserting("assert abs(f(3) - 9) < 1e-6", "f"),
        "class X:\n    __sub__ = __rsub__ = __abs__ = lambda *a: X()\n    __lt__ = lambda *a: True\n"
        "def f(x): return X()",
        "crashed",
        0.0,
    ),
    "stop iteration": Golden(
        asserting("assert all(map(lambda t: f(t) == 9, [3, 4]))", "f"), "def f(x): raise StopIteration", "crashed", 0.0
    ),
    "garbled answer": Golden(
        asserting("assert f(3) == 9", "f"),
        "import os, json, struct\ndef f(x):\n    for n in range(9):\n"
        "        m = json.dumps({'re': n, 'x': 5}).encode()\n"
        "        os.write(4, struct.pack('>I', len(m)) + m)\n    return 9",
        "crashed",
        0.0,
        "protocol_bytes",
    ),
    "threads in the test": Golden(
        asserting(
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
            "    assert list(pool.map(f, range(50))) == list(range(1, 51))",
            "f",
        ),
        "def f(x): return x + 1",
        "passed",
        1.0,
    ),
    "test that exits": Golden(
        asserting("import sys\nassert f(1) == 2\nsys.exit(0)", "f"), "def f(x): return x + 1", "passed", 1.0
    ),
    "class of the prelude": Golden(
        asserting("assert f(Node(1, Node(2))) == 3", "f", prelude=NODE),
        "def f(node):\n    total = 0\n    while node:\n        total += node.value\n        node = node.next\n"
        "    return total",
        "passed",
        1.0,
    ),
    "frames of the test": Golden(
        asserting("def steps():\n    secret = 41\n    yield 1\nassert f(steps()) == 7", "f"),
        "def f(g):\n    try: return g.gi_frame.f_locals['secret']\n    except AttributeError: return 7",
        "passed",
        1.0,
    ),
    "types of the standard library": Golden(
        asserting(STANDARD_TEST, "f"),
        STANDARD_IMPORTS + "def f(x): return x\ndef make():\n    return [D('1.5'), Fraction(1, 3), date(2024, 2, 29), "
        "deque([1], 3), Counter('aab'), OrderedDict(a=1), defaultdict(list, a=[1]), range(3), bytearray(b'x')]",
        "passed",
        1.0,
    ),
    "one object stays one": Golden(
        asserting("assert f() is f()\nassert f() == f()\nassert isinstance(f(), Box) and not isinstance(3, Box)", "f"),
        "class Box: pass\nbox = Box()\ndef f(): return box",
        "passed",
        1.0,
    ),
    "arithmetic of objects": Golden(
        asserting("v = sum([V(1), V(2)], V(0)) + V(3) * 2\nassert v.x == 9\ndel v.x\nassert int(V(4)) == 4", "V"),
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, n): return V(self.x * n)\n    def __int__(self): return self.x",
        "passed",
        1.0,
    ),
    "mutated deque": Golden(
        asserting("from collections import deque\nd = deque([1, 2])\nf(d)\nassert d == deque([2, 1])", "f"),
        "def f(d): d.rotate(1)",
        "passed",
        1.0,
    ),
    "operator forges": Golden(
        asserting("assert abs(f(3.0) - 9.0) < 1e-6", "f"), FORGER + "def f(x): return X()", "crashed", 0.0
    ),
    "operator forges a length": Golden(
        asserting("assert len(f(3) - {9}) == 0", "f"), FORGER + "def f(x): return X()", "crashed", 0.0
    ),
    "operator forges a truth": Golden(
        asserting("assert not (f(3) - {9})", "f"), FORGER + "def f(x): return X()", "crashed", 0.0
    ),
    "operator forges a number": Golden(
        asserting("assert float((f(3) - 9) ** 2) < 1e-6", "f"), FORGER + "def f(x): return X()", "crashed", 0.0
    ),
    "number that changes": Golden(
        asserting("import math\nx = f(1)\nassert math.pow(x, 1) == 1.0 and math.pow(x, 1) == 2.0", "f"),
        "class X:\n    n = 0\n    def __float__(self):\n        self.n += 1\n        return float(self.n)\n"
        "def f(x): return X()",
        "failed",
        0.0,
    ),
    "defaultdict of its own": Golden(
        asserting(
            "from collections import defaultdict\nd = defaultdict(lambda: 0, {1: 2})\nassert f(d) == {1: 2}", "f"
        ),
        "from collections import defaultdict\ndef f(d):\n    out = defaultdict(lambda: 0)\n    out.update(d)\n"
        "    return out",
        "passed",
        1.0,
    ),
    "test in a loop": Golden(asserting("while f(): pass", "f"), "def f(): return True", "timeout", 0.0),
}
