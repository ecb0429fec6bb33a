"""Templates: what each kind of session starts from, built in or read from the user's directory.

Must not start anything but an interpreter that tells whether it has numpy. Sources: design/API.md (limits);
notes/SANDBOX.md, section 2. A user's template stands in ``DIR/NAME.toml`` or ``DIR/NAME/template.toml``; relative paths
start from where the file stands. All keys may be left out::

    python = "/opt/py/bin/python3"            # the interpreter; default: the daemon's own
    command = ["node", "{file}"]              # a foreign one; without {file} it gets the code as its input
    preload = ["mypackage"]
    environment = { NAME = "value" }
    path = ["src"]                            # before sys.path, and readable; of a directory: ["."]
    read = ["/opt/data"]                      # readable
    limits = { time_s = 5, disk_mib = 64 }    # wire limits; disk_mib and inodes of all files of a session
    min_tier = "landlock"
    warm_up = "import mypackage"              # or warm_up_file = "trial.py": a grade tried at the start

A template named ``python`` or ``numpy`` stands in for the one that is built in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from collimate_ray.errors import ConfigError
from collimate_ray.sandbox.wire import LIMIT_NAMES, TIERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

#: Second names that clients may ask by.
ALIASES = {"py": "python"}

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Names that the daemon gives itself.
_OWN_VARIABLES = "COLLIMATE_"
#: Where commands of a session are looked for.
_PATH = "/usr/local/bin:/usr/bin:/bin"
_FRACTIONS = ("time_s", "wall_time_s")
_MOST = 1e9
_SHOWN_CHARS = 80
_NUMPY_S = 60.0

# What candidates commonly import. A module costs each fork about 4 us, one with a library of its own more; an import in
# a session costs it 0.3 to 30 ms. Too dear, measured, for what few import (share of a fork of this template): asyncio
# and unittest.mock 12 % each, ssl 6 %, multiprocessing 5 %.
_NAMES = """
    _strptime abc argparse array ast base64 bisect calendar cmath collections collections.abc concurrent.futures
    contextlib copy csv dataclasses datetime decimal difflib enum fractions functools gc graphlib hashlib heapq inspect
    io itertools json logging math numbers operator os pathlib pickle pprint queue random re secrets shutil statistics
    string struct subprocess sys tempfile textwrap threading time timeit traceback types typing unicodedata unittest
    uuid warnings weakref zlib
"""
_PYTHON = tuple(_NAMES.split())
_PYTHON_TRIAL = """
import array, bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq
import itertools, json, math, operator, random, re, statistics, string, subprocess, sys, threading, time, unittest

@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: float = 0.0

class Color(enum.Enum):
    RED = 1

@functools.lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(sorted([Point(2), Point(1)])[0].x, 1)

assert unittest.TextTestRunner(stream=sys.stdout).run(Test("test")).wasSuccessful()
json.loads(json.dumps({"a": [1, 2.5, None, "\\u00e9"]}))
re.sub(r"(\\w+)", lambda found: found[1].upper(), "a b")
datetime.datetime.strptime("2024-01-02", "%Y-%m-%d").isoformat()
collections.Counter("abca").most_common(1)
statistics.stdev([1, 2, 4]), decimal.Decimal("0.1") + 1, fractions.Fraction(1, 3) + 1
random.Random(1).sample(range(9), 3), hashlib.sha256(b"x").hexdigest(), fib(30), Color.RED, copy.deepcopy([[1]])
thread = threading.Thread(target=print)
thread.start()
thread.join()
try:
    raise ValueError("seen")
except ValueError:
    import traceback
    traceback.format_exc()
"""
# numpy.testing alone costs each fork 8 %, for an import of few grades
_NUMPY = ("numpy", "numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial", "numpy.ma")
_NUMPY_TRIAL = """
import numpy as np
rng = np.random.default_rng(1)
a = rng.normal(size=(8, 8))
np.random.seed(1)
np.random.rand(3), np.linalg.inv(a), np.linalg.eigh(a + a.T), np.linalg.svd(a), np.fft.fft(a)
np.einsum("ij,jk->ik", a, a), np.sort(a)
np.unique(a.round()), np.percentile(a, 50)
np.cumsum(a), np.where(a > 0, a, 0), np.allclose(a, a)
np.polyfit([1, 2, 3], [1, 2, 3], 1), np.polynomial.Polynomial([1, 2])(3), np.ma.masked_less(a, 0).mean()
np.array(["a", "b"]), np.array([{}], dtype=object), np.datetime64("2024-01-02"), repr(a), a.tolist(), a @ a
"""


@dataclass(frozen=True)
class TemplateLimits:
    """Of all files of a session: MiB, and how many there may be."""

    disk_mib: int = 256
    inodes: int = 16384


_DISK_LIMITS = tuple(each.name for each in fields(TemplateLimits))


@dataclass(frozen=True)
class Template:
    """What sessions start from.

    Attributes:
        name: As clients ask for it.
        python: The interpreter that sessions are forked from; None: the daemon's own.
        command: Argument list of a foreign interpreter, ``{file}`` in it stands for the code's file; (): Python.
        preload: Modules that sessions have from their first moment.
        environment: Added to sessions' environment.
        path: Directories before ``sys.path``, readable.
        read: Directories that are readable besides.
        limits: Of a session's files.
        exec_limits: Of an exec that does not say, by their names on the wire.
        min_tier: The weakest tier of isolation that will do, or None.
        warm_up: Code of a grade that is tried at the daemon's start.
    """

    name: str
    python: str | None = None
    command: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    limits: TemplateLimits = TemplateLimits()
    exec_limits: Mapping[str, float] = field(default_factory=dict)
    min_tier: str | None = None
    warm_up: str = ""


def load_templates(directory: str | None, executable: str = sys.executable) -> dict[str, Template]:
    """Give all templates by name: those built in, and the user's.

    Args:
        directory: Of the user's, or None.
        executable: The daemon's interpreter.

    Raises:
        ConfigError: One line that names template, file and key, what was expected and what was found.
    """
    templates = {"python": Template("python", preload=_PYTHON, warm_up=_PYTHON_TRIAL)}
    if _has_numpy(executable):
        templates["numpy"] = Template("numpy", preload=(*_PYTHON, *_NUMPY), warm_up=_NUMPY_TRIAL)
    if directory is not None:
        templates.update((name, _File(name, path).template()) for name, path in _find(directory).items())
    return templates


def _has_numpy(executable: str) -> bool:
    """Ask an interpreter that was started as a zygote is: it sees what a zygote sees."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('numpy') is None)"
    command = [executable, "-s", "-B", "-c", ask]
    answer = subprocess.run(command, cwd="/", env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_NUMPY_S)
    return answer.returncode == 0


def _find(directory: str) -> dict[str, Path]:
    """Give the files of the user's templates by name."""
    found: dict[str, Path] = {}
    try:
        entries = sorted(entry for entry in Path(directory).iterdir() if not entry.name.startswith("."))
        for entry in entries:
            path = entry / "template.toml" if entry.is_dir() else entry
            if path.suffix == ".toml" and os.path.lexists(path):
                _add(found, entry.name if entry.is_dir() else entry.stem, path)
    except OSError as error:
        raise ConfigError(
            f"templates: expected a directory that can be read, found {directory}: {error.strerror}"
        ) from None
    if not found:
        raise ConfigError(f"templates: expected NAME.toml or NAME/template.toml, found neither in {directory}")
    return found


def _add(found: dict[str, Path], name: str, path: Path) -> None:
    where = f"template {_shown(name)[1:-1]} ({_shown(str(path))[1:-1]}): name"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: expected 1 to 64 letters, digits, '_', '.' or '-', found {_shown(name)}")
    if name in ALIASES:
        raise ConfigError(f"{where}: expected one of its own, found the second name of {ALIASES[name]!r}")
    if name in found:
        raise ConfigError(f"{where}: expected one of its own, found that {found[name]} has it too")
    found[name] = path


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 4] + "..." + text[-1]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


class _File:
    """One file of a template, being read.

    Args:
        name: The template's.
        path: The file's.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._base = Path(os.path.abspath(path.parent))

    def template(self) -> Template:
        """Read it.

        Raises:
            ConfigError: It is wrong.
        """
        data = self._parsed()
        readers: dict[str, Callable[[str, Any], Any]] = {
            "python": self._python,
            "command": self._command,
            "preload": self._preload,
            "environment": self._environment,
            "path": self._directories,
            "read": self._directories,
            "min_tier": self._tier,
            "warm_up": self._text,
        }
        known = (*readers, "limits", "warm_up_file")
        for key in data:
            if key not in known:
                self._wrong(_shown(key), f"one of {', '.join(known)}", "an unknown key")
        if self._path.name == "template.toml":
            data.setdefault("path", ["."])
        made = {key: reader(key, data[key]) for key, reader in readers.items() if key in data}
        if "warm_up_file" in data:
            self._expect("warm_up" not in data, "warm_up_file", "no warm_up beside it", data["warm_up_file"])
            made["warm_up"] = self._content("warm_up_file", data["warm_up_file"])
        if "command" in made:
            self._runnable("command", made["command"][0], made.get("environment", {}).get("PATH", _PATH))
        limits = self._limits(data.get("limits", {}))
        disk = {name: int(value) for name, value in limits.items() if name in _DISK_LIMITS}
        wire = {name: value for name, value in limits.items() if name in LIMIT_NAMES}
        return Template(self._name, limits=TemplateLimits(**disk), exec_limits=wire, **made)

    def _wrong(self, key: str, expected: str, found: str) -> NoReturn:
        key = f"{key}: " if key else ""
        raise ConfigError(f"template {self._name} ({self._path}): {key}expected {expected}, found {found}")

    def _expect(self, ok: bool, key: str, expected: str, value: object) -> None:
        if not ok:
            self._wrong(key, expected, _shown(value))

    def _parsed(self) -> dict[str, Any]:
        text = self._read("", self._path)
        try:
            return dict(tomllib.loads(text))
        except (ValueError, RecursionError) as error:
            self._wrong("", "TOML", str(error).replace("\n", " "))

    def _read(self, key: str, path: Path) -> str:
        try:
            if path.exists() and not path.is_file():
                self._wrong(key, "a file", f"something else at {path}")
            return path.read_text("utf-8")
        except OSError as error:
            self._wrong(key, "a file that can be read", f"{path}: {error.strerror}")
        except UnicodeDecodeError as error:
            self._wrong(key, "UTF-8", f"byte 0x{error.object[error.start]:02x} at offset {error.start}")

    def _content(self, key: str, value: object) -> str:
        self._expect(_is_text(value), key, "a path", value)
        return self._read(key, self._base / str(value))

    def _text(self, key: str, value: object) -> str:
        self._expect(isinstance(value, str), key, "a string", value)
        return str(value)

    def _strings(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._wrong(key, "a list of strings", _shown(value))
        for index, each in enumerate(value):
            self._expect(_is_text(each), f"{key}[{index}]", "a string that is not empty", each)
        return tuple(value)

    def _python(self, key: str, value: object) -> str:
        self._expect(_is_text(value), key, "the path of an interpreter", value)
        path = str(self._base / str(value)) if "/" in str(value) else str(value)
        return self._runnable(key, path, os.environ.get("PATH", _PATH))

    def _runnable(self, key: str, program: str, path: str) -> str:
        found = shutil.which(program, path=path)
        if found is None:
            self._wrong(key, "a program that can be run", _shown(program))
        return os.path.abspath(found)

    def _command(self, key: str, value: object) -> tuple[str, ...]:
        words = self._strings(key, value)
        self._expect(bool(words), key, "at least the name of a program", value)
        return words

    def _preload(self, key: str, value: object) -> tuple[str, ...]:
        names = self._strings(key, value)
        for index, name in enumerate(names):
            self._expect(_MODULE.fullmatch(name) is not None, f"{key}[{index}]", "the name of a module", name)
        return names

    def _environment(self, key: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            self._wrong(key, "a table of strings", _shown(value))
        for name, text in value.items():
            at = f"{key}.{name}" if _VARIABLE.fullmatch(name) else key
            self._expect(at != key, key, "names of letters, digits and '_'", name)
            self._expect(not name.startswith(_OWN_VARIABLES), at, f"no name that starts with {_OWN_VARIABLES}", name)
            self._expect(isinstance(text, str) and "\0" not in text, at, "a string", text)
        return value

    def _directories(self, key: str, value: object) -> tuple[str, ...]:
        paths = tuple(os.path.normpath(self._base / each) for each in self._strings(key, value))
        for index, path in enumerate(paths):
            self._expect(os.path.isdir(path), f"{key}[{index}]", "a directory", path)
        return paths

    def _tier(self, key: str, value: object) -> str:
        self._expect(value in TIERS, key, f"one of {', '.join(TIERS)}", value)
        return str(value)

    def _limits(self, value: object) -> dict[str, float]:
        if not isinstance(value, dict):
            self._wrong("limits", "a table of numbers", _shown(value))
        known = (*LIMIT_NAMES, *_DISK_LIMITS)
        for name, number in value.items():
            if name not in known:
                self._wrong("limits", f"only {', '.join(known)}", f"the unknown limit {_shown(name)}")
            at, is_number = f"limits.{name}", isinstance(number, int | float) and not isinstance(number, bool)
            self._expect(is_number and 0 < number < _MOST, at, "a number above 0", number)
            self._expect(name in _FRACTIONS or number == int(number), at, "a whole number", number)
        return {name: number if name in _FRACTIONS else int(number) for name, number in value.items()}
