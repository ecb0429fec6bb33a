"""The in-session program as one source string, made from the texts of ``values.py``, what it uses, and ``runner/``.

Must not import the runner: it is written for the session's interpreter, not for this process.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import re
import zlib
from pathlib import Path

from collimate_ray.source import parse_python

#: The order in which the texts are joined: each uses only what stands above it.
_ORDER = (
    "jsontext",
    "values",
    "jail/process",
    "jail/pins",
    "runner/channel",
    "runner/peer",
    "runner/candidate",
    "runner/launcher",
    "runner/runs",
    "runner/cases",
    "runner/asserts",
    "runner/keeper",
)


def _texts() -> list[str]:
    root = Path(__file__).resolve().parent.parent
    return [(root / f"{name}.py").read_text(encoding="utf-8") for name in _ORDER]


@functools.cache
def runner_version() -> str:
    """Give the program's version: 12 hex characters of a hash of its texts."""
    return hashlib.sha256("\0".join(_texts()).encode()).hexdigest()[:12]


@functools.cache
def runner_source() -> str:
    """Give the program: a module that defines ``main(request_path="")``, without comments, docstrings and types."""
    body = [node for text in _texts() for node in parse_python(text).body if not _is_dropped(node)]
    bare = _Bare().visit(ast.Module(body, []))
    return _INDENT.sub(lambda indent: " " * (len(indent.group()) // 4), ast.unparse(bare)) + "\n"


def runner_code(call: str) -> str:
    """Give the program packed into one short source string that ends with a call; for daemons that lack it.

    A real daemon takes 128 KiB of composed command, so the program leaves room for what it is to grade.

    Args:
        call: The last statement, such as ``main('/tmp/request.json')``.
    """
    packed = base64.b64encode(zlib.compress(runner_source().encode(), 9)).decode()
    load = f"exec(compile(zlib.decompress(base64.b64decode({packed!r})), 'runner', 'exec'))"
    return f"import base64, zlib\n{load}\n{call}\n"


#: Leading blanks of a line; no string of the program holds a newline, so every line is a line of code.
_INDENT = re.compile(r"^(    )+", re.MULTILINE)


def _is_dropped(node: ast.stmt) -> bool:
    """Module docstrings, and imports of what is joined anyway."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__" or (node.module or "").startswith("collimate_ray")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Bare(ast.NodeTransformer):
    """Drops docstrings and annotations: they are most of the text and do nothing there."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._drop_docstring(node)
        node.returns = None
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]:
            if arg is not None:
                arg.annotation = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._drop_docstring(node)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    @staticmethod
    def _drop_docstring(node: ast.FunctionDef | ast.ClassDef) -> None:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
