"""Templates: those built in, and a user's directory, right and wrong."""

import json
import os
import subprocess
import sys

import pytest

from collimate_ray.daemon.templates import ALIASES, Template, TemplateLimits, load_templates
from collimate_ray.errors import ConfigError

#: Imports what a template preloads, then runs its trial, in an interpreter started as a zygote is.
PROBE = """
import gc, importlib, json, os, sys
preload, trial = json.loads(sys.stdin.read())
def now():
    switches = sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled()
    return (dict(os.environ), switches, os.listdir("/proc/self/fd"))
before = now()
for name in preload:
    importlib.import_module(name)
after = now()
threads, known = len(os.listdir("/proc/self/task")), set(sys.modules)
exec(trial, {"__name__": "__main__"})
print()
print(json.dumps([before == after, threads, sorted(set(sys.modules) - known)]))
"""


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_built_in_templates_preload_all_that_their_trial_needs(name):
    template = load_templates(None)[name]
    run = subprocess.run(
        [sys.executable, "-s", "-B", "-c", PROBE],
        input=json.dumps([template.preload, template.warm_up]),
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [True, 1, []]


def test_numpy_is_there_only_where_the_interpreter_has_it(tmp_path):
    import venv

    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    assert list(load_templates(None, str(tmp_path / "bare/bin/python"))) == ["python"]


def test_aliases_lead_to_templates():
    assert set(ALIASES.values()) <= set(load_templates(None))


def test_a_file_says_everything(tmp_path):
    (tmp_path / "lib").mkdir()
    write(
        tmp_path / "mine.toml",
        f'python = "{sys.executable}"\n'
        'preload = ["json", "os.path"]\n'
        'environment = { A_B = "1", EMPTY = "" }\n'
        'path = ["lib"]\n'
        'read = ["/usr"]\n'
        "limits = { time_s = 2.5, processes = 3, disk_mib = 8, inodes = 100 }\n"
        'min_tier = "landlock"\n'
        'warm_up = "import json"\n',
    )
    assert load_templates(str(tmp_path))["mine"] == Template(
        "mine",
        python=sys.executable,
        preload=("json", "os.path"),
        environment={"A_B": "1", "EMPTY": ""},
        path=(str(tmp_path / "lib"),),
        read=("/usr",),
        limits=TemplateLimits(disk_mib=8, inodes=100),
        exec_limits={"time_s": 2.5, "processes": 3},
        min_tier="landlock",
        warm_up="import json",
    )


def test_a_directory_is_its_own_path(tmp_path, monkeypatch):
    write(tmp_path / "mine/template.toml", 'warm_up_file = "trial.py"\nread = ["data"]')
    write(tmp_path / "mine/trial.py", "import ours")
    (tmp_path / "mine/data").mkdir()
    monkeypatch.chdir(tmp_path)  # what comes out holds wherever it is used
    found = load_templates(".")["mine"]
    assert found.path == (str(tmp_path / "mine"),)
    assert found.read == (str(tmp_path / "mine/data"),)
    assert found.warm_up == "import ours"


def test_an_empty_file_is_a_template_and_other_files_are_none(tmp_path):
    for name in ("mine.toml", "README.md", ".hidden.toml", "data/x.txt"):
        write(tmp_path / name, "")
    built_in = load_templates(None)
    assert load_templates(str(tmp_path)) == {**built_in, "mine": Template("mine")}


def test_foreign_interpreters_and_built_in_names(tmp_path):
    write(tmp_path / "shell.toml", 'command = ["sh", "-e", "{file}"]')
    write(tmp_path / "python.toml", 'preload = ["json"]')
    found = load_templates(str(tmp_path))
    assert found["shell"].command == ("sh", "-e", "{file}")
    assert found["python"] == Template("python", preload=("json",))


WRONG = [
    ("a = ", "expected TOML, found "),
    ("x = " + "[" * 10000, "expected TOML, found "),
    ("pyton = 'x'", "'pyton': expected one of python, command, "),
    ("python = 3", "python: expected the path of an interpreter, found 3"),
    ("python = 'no-such-python'", "python: expected a program that can be run, found 'no-such-python'"),
    ("python = './not-executable'", "python: expected a program that can be run, found "),
    ("command = []", "command: expected at least the name of a program, found []"),
    ("command = 'sh'", "command: expected a list of strings, found 'sh'"),
    ("command = ['no-such-program']", "command: expected a program that can be run, found 'no-such-program'"),
    ("preload = ['json', 'a-b']", "preload[1]: expected the name of a module, found 'a-b'"),
    ("preload = [1]", "preload[0]: expected a string that is not empty, found 1"),
    ("environment = ['A']", "environment: expected a table of strings, found ['A']"),
    ("environment = { A = 1 }", "environment.A: expected a string, found 1"),
    ("environment = { 'A=B' = '' }", "environment: expected names of letters, digits and '_', found 'A=B'"),
    ("environment = { COLLIMATE_X = '' }", "environment.COLLIMATE_X: expected no name that starts with COLLIMATE_"),
    ("path = ['nowhere']", "path[0]: expected a directory, found "),
    ("read = ['']", "read[0]: expected a string that is not empty, found ''"),
    ("limits = 3", "limits: expected a table of numbers, found 3"),
    ("limits = { memory = 3 }", "limits: expected only time_s, "),
    ("limits = { memory_mib = 0 }", "limits.memory_mib: expected a number above 0, found 0"),
    ("limits = { memory_mib = 1.5 }", "limits.memory_mib: expected a whole number, found 1.5"),
    ("limits = { time_s = nan }", "limits.time_s: expected a number above 0, found nan"),
    ("limits = { inodes = true }", "limits.inodes: expected a number above 0, found True"),
    ("min_tier = 'vm'", "min_tier: expected one of rlimits, seccomp, landlock, userns, full, found 'vm'"),
    ("warm_up = 1", "warm_up: expected a string, found 1"),
    ("warm_up_file = 'none.py'", "warm_up_file: expected a file that can be read, found "),
    ("warm_up_file = '.'", "warm_up_file: expected a file, found "),
    ("warm_up_file = 'latin'", "warm_up_file: expected UTF-8, found byte 0xe9 at offset 1"),
    ("warm_up = ''\nwarm_up_file = 'none.py'", "warm_up_file: expected no warm_up beside it, found 'none.py'"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_what_is_wrong_is_told_in_one_line(tmp_path, text, expected):
    path = tmp_path / "mine.toml"
    write(path, text)
    write(tmp_path / "not-executable", "")
    (tmp_path / "latin").write_bytes(b"#\xe9")
    line = refused(tmp_path)
    assert line.startswith(f"template mine ({path}): {expected}")


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xff")
    assert refused(tmp_path).endswith("mine.toml): expected UTF-8, found byte 0xff at offset 0")
    (tmp_path / "mine.toml").unlink()
    os.mkfifo(tmp_path / "mine.toml")
    assert "mine.toml): expected a file, found something else at " in refused(tmp_path)
    (tmp_path / "mine.toml").unlink()
    (tmp_path / "mine.toml").symlink_to("nowhere")
    assert refused(tmp_path).endswith("mine.toml: No such file or directory")


@pytest.mark.parametrize("name", ["a b", "é", "x" * 65, "a\nb"])
def test_names(tmp_path, name):
    write(tmp_path / f"{name}.toml", "")
    assert "name: expected 1 to 64 letters, digits, '_', '.' or '-', found " in refused(tmp_path)


def test_names_of_others(tmp_path):
    write(tmp_path / "py.toml", "")
    assert refused(tmp_path).endswith("name: expected one of its own, found the second name of 'python'")
    (tmp_path / "py.toml").unlink()
    write(tmp_path / "mine.toml", "")
    write(tmp_path / "mine/template.toml", "")
    assert "name: expected one of its own, found that " in refused(tmp_path)


def test_directories_without_templates(tmp_path):
    assert refused(tmp_path) == f"templates: expected NAME.toml or NAME/template.toml, found neither in {tmp_path}"
    missing = tmp_path / "missing"
    line = f"templates: expected a directory that can be read, found {missing}: No such file or directory"
    assert refused(missing) == line


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def refused(directory):
    with pytest.raises(ConfigError) as caught:
        load_templates(str(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)
