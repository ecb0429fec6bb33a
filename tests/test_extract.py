import time

import pytest

from collimate_ray.extract import extract_code

GOOD = "def area(w, h):\n    return w * h"
BAD = "def area(w, h):\n    return w + h"


def fenced(code, mark="```", info="python"):
    return f"{mark}{info}\n{code}\n{mark}"


CASES = {
    "plain fence": (f"Sure.\n{fenced(GOOD)}\nDone.", GOOD),
    "draft then final": (f"{fenced(BAD)}\nBetter:\n{fenced(GOOD)}", GOOD),
    "final is worse": (f"{fenced(GOOD)}\nOr:\n{fenced(BAD)}", BAD),
    "usage block last": (f"{fenced(GOOD)}\n{fenced('print(area(1, 2))')}", GOOD),
    "shell block last": (f"{fenced(GOOD)}\n{fenced('python3 area.py', info='bash')}", GOOD),
    "text block last": (f"{fenced(GOOD)}\n{fenced('>>> area(2, 3)', info='text')}", GOOD),
    "other language last": (f"{fenced(GOOD)}\n{fenced('function area() {}', info='js')}", GOOD),
    "python3 tag": (fenced(GOOD, info="python3"), GOOD),
    "spaced upper tag with title": (fenced(GOOD, info=' Python title="a.py"'), GOOD),
    "attribute tag": (fenced(GOOD, info="{.python}"), GOOD),
    "untagged": (fenced(GOOD, info=""), GOOD),
    "tildes": (fenced(GOOD, "~~~"), GOOD),
    "doubled opening": (f"```python\n{fenced(GOOD)}", GOOD),
    "never closed": (f"Here:\n```python\n{GOOD}\n", GOOD + "\n"),
    "crlf": (fenced(GOOD).replace("\n", "\r\n"), GOOD),
    "byte order mark": (fenced("\ufeff" + GOOD), GOOD),
    "in a list": ("1. So:\n\n   ```python\n   def area(w, h):\n       return w * h\n   ```\n", GOOD),
    "thinking": (f"<think>\n{fenced(BAD)}\n</think>\n{fenced(GOOD)}", GOOD),
    "only the closing tag": (f"{fenced(BAD)}\n</think>\n{fenced(GOOD)}", GOOD),
    "thinking never ends": (f"<think>\n{fenced(GOOD)}", ""),
    "thinking was right": (f"<think>\n{fenced(GOOD)}\n</think>\n{fenced(BAD)}", BAD),
    "no fence": (GOOD, GOOD),
    "no fence but prose": (f"Here it is:\n{GOOD}\nBye", ""),
    "no fence, another name": ("def volume():\n    return 1", ""),
    "begin and done": (f"[BEGIN]\n{GOOD}\n[DONE]", GOOD),
    "nothing": ("I do not know.", ""),
    "empty": ("", ""),
    "broken code stays": (fenced("def area(w, h)\n    return 1"), "def area(w, h)\n    return 1"),
    "assigned": (fenced("area = lambda w, h: w * h"), "area = lambda w, h: w * h"),
}


@pytest.mark.parametrize(("text", "code"), CASES.values(), ids=CASES)
def test_extraction(text, code):
    assert extract_code(text, "area") == code


def test_fences_inside_strings_do_not_end_a_block():
    code = 'def area(w, h):\n    """Times.\n\n    ```python\n    area(1, 2)\n    ```\n    """\n    return w * h'
    assert extract_code(fenced(code), "area") == code
    assert extract_code(fenced(code, "````"), "area") == code


def test_a_method_of_solution_defines_the_entry():
    code = "class Solution:\n    def area(self, w, h):\n        return w * h"
    assert extract_code(fenced(code) + "\n" + fenced("x = 1"), "area") == code


def test_without_an_entry_the_last_python_block_wins():
    assert extract_code(f"{fenced('print(1)')}\n{fenced('print(2)')}\n{fenced('2', info='text')}", "") == "print(2)"


@pytest.mark.parametrize("odd", ["\x00", "\ud83d", "(" * 5000, "x = " + "-" * 20000 + "1"])
def test_odd_code_is_taken_as_it_is(odd):
    assert extract_code(fenced(GOOD + "\n" + odd), "area") == GOOD + "\n" + odd


FLOODS = {
    "tildes": "~" * 100_000 + "`",
    "blanks": "~~~" + " " * 100_000 + "`",
    "blank lines": "```python\n(\n" + "\n" * 100_000 + ")x x\n```",
    "empty blocks": "```\n```\n" * 12_000,
    "broken blocks": "```\n(\n" * 16_000,
}


@pytest.mark.parametrize("text", FLOODS.values(), ids=FLOODS)
def test_text_that_is_all_fences_costs_no_more_than_other_text(text):
    def seconds(completion):
        began = time.process_time()
        extract_code(completion, "area")
        return time.process_time() - began

    # four times the text: about four times as long; quadratic would be sixteen
    assert seconds(text) < 10 * max(seconds(text[: len(text) // 4]), 0.05)
