"""From a completion's text to the candidate's code: the one extractor that all hooks share. Pure.

Fences follow CommonMark 0.31 (backticks or tildes, three or more, closed by at least as many) where model text does;
where it does not, the choice is documented at the line that makes it. Nothing here judges or filters code.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from dataclasses import dataclass

from collimate_ray.source import parse_python

#: First words of an info string that mean Python.
_PYTHON = ("python", "python3", "py", "py3")

#: Closing fences tried for one block, and parses of one completion: code that holds fences in its strings is rare, and
#: a text that is nothing but fences must not cost more than another.
_MAX_CLOSINGS = 32
_MAX_PARSES = 256


#: The file name that a candidate is parsed under; the compiler's warnings about it are nobody's business here.
_FILENAME = "<collimate candidate>"
warnings.filterwarnings("ignore", module=re.escape(_FILENAME))


@dataclass(frozen=True)
class _Block:
    language: str
    code: str


def extract_code(completion: str, entry: str = "solve") -> str:
    """Take the code out of a completion.

    The last fenced block that is Python and defines ``entry`` wins; without one, the last block tagged as Python;
    without one, the last untagged block that parses. Text in ``<think>`` is never taken. Text without a fence is code
    only if it parses as Python and defines ``entry``.

    Args:
        completion: A model's text.
        entry: The name that the code should define; "" where the kind of spec has none.

    Returns:
        The code, without a byte order mark; "" if there is none.
    """
    text = _answer(completion.replace("\r\n", "\n"))
    blocks = [block for block in _blocks(text) if block.language in ("", "python")]
    defining = [block for block in blocks if entry and defines(block.code, entry)]
    tagged = [block for block in blocks if block.language == "python"]
    parsing = [block for block in blocks if syntax_tree(block.code) is not None]
    for chosen in (defining, tagged, parsing):
        if chosen:
            return chosen[-1].code
    return "" if blocks else _unfenced(text, entry)


def _answer(text: str) -> str:
    """Drop reasoning: up to the last closing tag, else from an opening tag that never closes."""
    _, closed, rest = text.rpartition("</think>")
    return rest if closed else text.partition("<think>")[0]


def _unfenced(text: str, entry: str) -> str:
    code = text.strip("\n").lstrip("\ufeff")
    if code.startswith("[BEGIN]"):  # the few-shot form of MBPP
        code = code[len("[BEGIN]") :].partition("[DONE]")[0].strip("\n")
    if syntax_tree(code) is None or not code.strip():
        return ""
    return code if not entry or defines(code, entry) else ""


@dataclass(frozen=True)
class _Fence:
    indent: str
    mark: str
    info: str


def _fence(line: str) -> _Fence | None:
    """Read a line as an opening fence."""
    bare = line.lstrip(" \t")
    rest = bare.lstrip(bare[:1]) if bare[:1] in ("`", "~") else bare
    mark = bare[: len(bare) - len(rest)]
    if len(mark) < 3 or (mark[0] == "`" and "`" in rest):
        return None
    return _Fence(line[: len(line) - len(bare)], mark, rest.strip())


def _blocks(text: str) -> list[_Block]:
    lines = text.split("\n")
    blocks: list[_Block] = []
    at, parses = 0, _MAX_PARSES
    while at < len(lines):
        opening = _fence(lines[at])
        at += 1
        if opening is None or (at < len(lines) and _opens(lines[at])):
            continue  # no fence, or the first of a doubled opening
        end, tried = _end_of_block(lines, at, opening, parses)
        parses -= tried
        blocks.append(_Block(_language(opening.info), _body(lines[at:end], opening.indent)))
        at = end + 1
    return blocks


def _opens(line: str) -> bool:
    """Tell whether a line can only be an opening fence: it names a language."""
    found = _fence(line)
    return found is not None and bool(found.info)


def _language(info: str) -> str:
    words = info.strip("{}.").lower().split(None, 1)
    word = words[0].strip("{}.,:") if words else ""
    return "python" if word in _PYTHON else word


def _end_of_block(lines: list[str], start: int, opening: _Fence, parses: int) -> tuple[int, int]:
    """Find the closing fence: the first after which the block parses (strings hold fences too), else the first.

    Returns:
        Its line, and how many parses it took to find it.
    """
    closing = (at for at in range(start, len(lines)) if _closes(lines[at], opening.mark))
    first = next(closing, len(lines))  # none: cut off right after the code
    if first == len(lines) or _language(opening.info) not in ("", "python"):
        return first, 0
    tried = 0
    for at in itertools.chain([first], closing):
        if tried == min(parses, _MAX_CLOSINGS):
            break
        tried += 1
        if syntax_tree(_body(lines[start:at], opening.indent)) is not None:
            return at, tried
    return first, tried


def _closes(line: str, mark: str) -> bool:
    found = line.strip()
    return len(found) >= len(mark) and found == mark[0] * len(found)


def _body(lines: list[str], indent: str) -> str:
    """Take a fence's own indentation off its lines."""
    cut = [line[len(indent) :] if line.startswith(indent) else line.lstrip(" \t") for line in lines]
    return "\n".join(cut).lstrip("\ufeff")


def syntax_tree(code: str) -> ast.Module | None:
    """Parse a model's code quietly; None if it is not Python."""
    try:
        return parse_python(code, _FILENAME)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defines(code: str, entry: str) -> bool:
    """Tell whether code binds ``entry`` at its top level, or as a method of ``class Solution``."""
    tree = syntax_tree(code)
    if tree is None:
        return re.search(rf"^[ \t]*(def|class)[ \t]+{re.escape(entry)}\b", code, re.MULTILINE) is not None
    return any(entry in _bound_by(node) for node in tree.body)


def _bound_by(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds, blocks under ``if`` and ``try`` included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.ClassDef):
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        return {node.name} | (methods if node.name == "Solution" else set())
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    inner = [part for part in ast.walk(node) if part is not node and isinstance(part, ast.FunctionDef | ast.ClassDef)]
    return names | {part.name for part in inner}
