import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from collimate_ray.source import parse_python


@pytest.fixture
def busy_collector():
    """A garbage collector that runs often and calls back: it lets another thread in while a tree is being made."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(lambda *_: sum(range(50)))
    gc.set_threshold(50)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.pop()
    sys.setswitchinterval(interval)


def test_many_threads_parse_at_once(busy_collector):
    # with ast.parse itself, CPython 3.11.7 fails some of these
    source = "\n".join(f"def f{n}(x):\n    return [x + {n} for x in range({n}) if x % 2]" for n in range(60))
    with ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(parse_python, [source] * 48))
    assert {len(tree.body) for tree in trees} == {60}


@pytest.mark.parametrize(("source", "error"), [("def", SyntaxError), ("\0", (SyntaxError, ValueError))])
def test_what_is_no_source_says_so(source, error):
    with pytest.raises(error):
        parse_python(source)
