"""The four kinds of ground truth: unit tests, properties, programs, asserts. Pure.

Names and constructors of ``UnitTestReward`` and ``PropertyReward`` are the published SDK's, scoring by fraction
included; what they check happens outside the session.
"""

from __future__ import annotations

import ast
import base64
import json
import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from collimate_ray.errors import CheckerError, SpecError, shown
from collimate_ray.source import parse_python
from collimate_ray.spec.base import Case, RewardSpec, Scoring
from collimate_ray.spec.compare import Checker, checker_from
from collimate_ray.spec.report import CaseRecord, Report
from collimate_ray.values import ValueCrossingError, decode, dumps, encode


def _identifier(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.isidentifier() or keyword.iskeyword(value):
        raise SpecError(f"{name}: expected a Python name, found {value!r}")


def _test_rows(tests: Any, needed: tuple[str, str]) -> list[Mapping[str, Any]]:
    """Check a list of tests: at least one, each an object with the needed keys."""
    if not isinstance(tests, Sequence) or isinstance(tests, str | bytes) or not tests:
        raise SpecError(f"tests: expected a list of at least one test, found {shown(tests)}")
    for i, test in enumerate(tests):
        if not isinstance(test, Mapping):
            raise SpecError(f"tests[{i}]: expected an object, found {type(test).__name__}")
        for key in needed:
            if key not in test:
                raise SpecError(f"tests[{i}]: {key!r} is missing")
        for key in test:
            if key not in (*needed, "public", "points"):
                raise SpecError(f"tests[{i}]: unknown key {key!r}; known are {', '.join(needed)}, public, points")
        _check_options(i, test)
    return list(tests)


def _check_options(i: int, test: Mapping[str, Any]) -> None:
    if not isinstance(test.get("public", False), bool):
        raise SpecError(f"tests[{i}].public: expected true or false, found {shown(test['public'])}")
    points = test.get("points", 1)
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 < points < 1e12:
        raise SpecError(f"tests[{i}].points: expected a number above 0, found {shown(points)}")


def _call_case(args: Any, expected: Any, test: Mapping[str, Any]) -> Case:
    return Case([encode(arg) for arg in args], expected, test.get("public", False), float(test.get("points", 1)))


class _CallSpec(RewardSpec):
    """Kinds whose cases are calls with an expected value."""

    def _checker(self) -> Checker:
        return Checker("values")

    def passes(self, case: Case, record: CaseRecord) -> bool:
        """Compare the decoded answer with the expected value."""
        try:
            return self._checker().values(case.expected, decode(record.value))
        except ValueCrossingError:  # an object of no plain form equals nothing
            return False
        except (ArithmeticError, TypeError, ValueError):  # nor does a value that cannot be compared: sNaN, arrays
            return False

    def shown(self, case: Case, record: CaseRecord) -> tuple[str, str]:
        """Show both in the encoding in which they cross."""
        return dumps(record.value) if record.status == "ok" else "", dumps(encode(case.expected))


@dataclass(frozen=True)
class UnitTestReward(_CallSpec):
    """Calls of the candidate's function with expected values.

    Attributes:
        tests: ``[{"input", "expected", "public"?, "points"?}]``, at least one; an input that is a list is spread over
            the arguments, anything else is the one argument.
        entry: The function's name; a method of ``class Solution`` will do.
        checker: ``values`` (default), ``exact`` or ``{"name": "float", "abs", "rel"}``.
    """

    kind: ClassVar[str] = "unit_tests"
    tests: Sequence[Mapping[str, Any]]
    entry: str = "solve"
    checker: Any = "values"
    scoring: Scoring = field(default="fraction", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _identifier("entry", self.entry)
        checker_from(self.checker, self.kind)
        object.__setattr__(self, "tests", _test_rows(self.tests, ("input", "expected")))
        try:
            self.cases()
        except ValueCrossingError as error:
            raise SpecError(f"tests: a value that cannot cross: {error}") from None

    def _checker(self) -> Checker:
        return checker_from(self.checker, self.kind)

    def cases(self) -> tuple[Case, ...]:
        """Give one case a test."""
        spread = (test["input"] if isinstance(test["input"], list) else [test["input"]] for test in self.tests)
        return tuple(
            _call_case(args, decode(encode(test["expected"])), test)
            for args, test in zip(spread, self.tests, strict=True)
        )


#: Draws the cases of a property in a session of its own, before any candidate runs.
_DRAW = """
def collimate_draw(seed, k):
    import copy, random
    random.seed(int(seed, 16))
    rng = random.Random(int(seed, 16))
    drawn = []
    for _ in range(k):
        args = list(generate(rng))
        drawn.append([args, reference(*copy.deepcopy(args))])
    return drawn
"""


@dataclass(frozen=True)
class PropertyReward(_CallSpec):
    """The candidate against a reference on ``k`` inputs drawn from the seed.

    Attributes:
        reference: Source that defines ``reference(*args)``; or, as the SDK has it, the body of a function of ``x``.
        generator: Source that defines ``generate(rng)``, which gives the list of arguments; or, with a reference in
            the SDK's form, an expression for ``x`` with ``random`` in scope.
        k: Inputs drawn, 1 to 10,000.
        entry: The candidate's function.
    """

    kind: ClassVar[str] = "property"
    draws_seed: ClassVar[bool] = True
    reference: str
    generator: str
    k: int = 16
    entry: str = "solve"
    scoring: Scoring = field(default="fraction", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _identifier("entry", self.entry)
        for name in ("reference", "generator"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise SpecError(f"{name}: expected source text, found {shown(value)}")
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 1 <= self.k <= 10_000:
            raise SpecError(f"k: expected a whole number from 1 to 10,000, found {self.k!r}")
        self._check_sources()

    def _check_sources(self) -> None:
        """Check both sources, each by itself so that the line of an error is the user's own."""
        if not _defines(self.reference, "reference"):
            self._check_sdk_form()
            return
        for name, wanted in (("reference", "reference"), ("generator", "generate")):
            source = getattr(self, name)
            try:
                parse_python(source)
            except (SyntaxError, ValueError) as error:
                raise SpecError(f"{name} is not Python: {error}") from None
            if not _defines(source, wanted):
                raise SpecError(f"{name}: expected source with a top-level def {wanted}(...), found none")

    def _check_sdk_form(self) -> None:
        try:
            parse_python(self._source())
        except (SyntaxError, ValueError):
            raise SpecError(
                "reference: expected source with a top-level def reference(...), or the body of a function of x with "
                f"an expression as generator, found {shown(self.reference)}"
            ) from None

    def _source(self) -> str:
        if _defines(self.reference, "reference"):
            return f"{self.reference}\n{self.generator}\n"
        body = textwrap.indent(textwrap.dedent(self.reference), "    ")
        return f"import random\ndef reference(x):\n{body}\ndef generate(rng):\n    return [{self.generator}]\n"

    def cases(self) -> tuple[Case, ...]:
        """Give (): they are drawn from the seed."""
        return ()

    def draw_request(self, seed: str) -> dict[str, Any]:
        """Make the request that draws the cases, for a session without a candidate."""
        return {
            "kind": "calls",
            "code": self._source() + _DRAW,
            "prelude": self.prelude,
            "entry": "collimate_draw",
            "cases": [[seed, self.k]],
            "stop_early": True,
            "shared": False,
        }

    def drawn(self, report: Report) -> tuple[Case, ...]:
        """Read the cases out of the report of ``draw_request``.

        Raises:
            CheckerError: Reference or generator failed, or gave what has no plain form.
        """
        record = report.cases[0] if report.cases else report.load
        if record.status != "ok":
            raise CheckerError(f"reference or generator: {record.status} {': '.join(record.exc)}".rstrip())
        try:
            return tuple(_call_case(args, expected, {}) for args, expected in decode(record.value))
        except ValueCrossingError as error:
            raise CheckerError(f"reference or generator: {error}") from None


def _defines(source: str, name: str) -> bool:
    """Tell whether source has a top-level function of that name; the SDK's form of a property has none."""
    try:
        return any(isinstance(node, ast.FunctionDef) and node.name == name for node in parse_python(source).body)
    except (SyntaxError, ValueError):
        return re.search(rf"^def {name}\b", source, re.MULTILINE) is not None


@dataclass(frozen=True)
class StdioReward(RewardSpec):
    """Whole programs: what they print for an input.

    Attributes:
        tests: ``[{"stdin", "stdout", "public"?, "points"?}]``, at least one, both text.
        checker: ``tokens`` (default: line by line, tokens per line), ``exact`` or ``{"name": "float", ...}``.
    """

    kind: ClassVar[str] = "stdin_stdout"
    tests: Sequence[Mapping[str, Any]]
    checker: Any = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        checker_from(self.checker, self.kind)
        object.__setattr__(self, "tests", _test_rows(self.tests, ("stdin", "stdout")))
        for i, test in enumerate(self.tests):
            for key in ("stdin", "stdout"):
                if not isinstance(test[key], str):
                    raise SpecError(f"tests[{i}].{key}: expected text, found {shown(test[key])}")

    def cases(self) -> tuple[Case, ...]:
        """Give one case a test."""
        return tuple(
            Case(test["stdin"], test["stdout"], test.get("public", False), float(test.get("points", 1)))
            for test in self.tests
        )

    def request(self, candidate: str, cases: Sequence[Case]) -> dict[str, Any]:
        """Ask for a run of the program a case."""
        request = super().request(candidate, cases)
        inputs = (str(given).encode("utf-8", "surrogatepass") for given in request["cases"])
        return {**request, "kind": "programs", "cases": [base64.b64encode(given).decode() for given in inputs]}

    def passes(self, case: Case, record: CaseRecord) -> bool:
        """Compare the outputs."""
        return checker_from(self.checker, self.kind).texts(case.expected, _output(record))

    def shown(self, case: Case, record: CaseRecord) -> tuple[str, str]:
        """Show both outputs."""
        return _output(record), case.expected


def _output(record: CaseRecord) -> str:
    return record.out.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class AssertReward(RewardSpec):
    """Test code that calls the candidate: bare asserts, or ``check(candidate)``, which the grader then calls.

    Attributes:
        test_code: The test; its free names are the prelude's, else the candidate's.
        entry: What ``check`` is given, and what a completion must define.
    """

    kind: ClassVar[str] = "assert_tests"
    test_code: str
    entry: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _identifier("entry", self.entry)
        for name in ("test_code", "prelude"):
            source = getattr(self, name)
            if not isinstance(source, str):
                raise SpecError(f"{name}: expected text, found {shown(source)}")
            try:
                tree = parse_python(source)
            except (SyntaxError, ValueError) as error:
                raise SpecError(f"{name} is not Python: {error}") from None
            if name == "test_code" and not any(isinstance(part, ast.Assert | ast.Call) for part in ast.walk(tree)):
                raise SpecError("test_code: expected at least one assert, found none")

    def cases(self) -> tuple[Case, ...]:
        """Give one case: the test as a whole."""
        return (Case(None),)

    def request(self, candidate: str, cases: Sequence[Case]) -> dict[str, Any]:
        """Ask for a run of the test code."""
        shared = self.isolation == "shared"
        request = super().request(candidate, cases)
        return {**request, "kind": "asserts", "test_code": self.test_code, "shared": shared}

    def passes(self, case: Case, record: CaseRecord) -> bool:
        """Take the keeper's word."""
        return True

    def shown(self, case: Case, record: CaseRecord) -> tuple[str, str]:
        """Show nothing: the test is hidden."""
        return "", ""


def reward_spec_from_ground_truth(ground_truth: Any, entry: str = "solve") -> RewardSpec:
    """Make a spec of the SDK's ground truths.

    Args:
        ground_truth: A list of ``{"input", "expected"}``; or an object with ``reference`` and ``generator`` (and ``k``,
            ``entry``); or either as a JSON string.
        entry: The candidate's function, where the ground truth names none.

    Returns:
        A spec that scores by fraction, as the SDK does.

    Raises:
        SpecError: It is neither, or is broken.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError as error:
            raise SpecError(f"ground_truth: not JSON: {error}") from None
    if isinstance(ground_truth, list):
        return UnitTestReward(ground_truth, entry)
    if isinstance(ground_truth, Mapping) and {"reference", "generator"} <= set(ground_truth):
        given = {key: ground_truth[key] for key in ("reference", "generator", "k", "entry") if key in ground_truth}
        return PropertyReward(**{"entry": entry, **given})
    raise SpecError(
        "ground_truth: expected a list of unit tests or an object with reference and generator, "
        f"found {type(ground_truth).__name__}"
    )
