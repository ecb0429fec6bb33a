"""What the wheel and the sdist hold, and that each works once it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
NEEDED = (
    "collimate_ray/__init__.py",
    "collimate_ray/py.typed",
    "collimate_ray/adapters/__init__.py",
    "collimate_ray/cli/data/demo.jsonl",
    "collimate_ray/jail/process.py",
)


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as git would give it: without what builds and tests leave in it."""
    target = tmp_path_factory.mktemp("copy") / "checkout"
    left_out = (".git", ".venv", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
    shutil.copytree(CHECKOUT, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    return target


@pytest.fixture(scope="module")
def dist(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from the sdist."""
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", target, copy, cwd=target)
    return target


def wheel_of(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def sdist_of(dist: Path) -> Path:
    return next(dist.glob("*.tar.gz"))


def test_the_wheel_holds_each_module_once(dist: Path) -> None:
    names = zipfile.ZipFile(wheel_of(dist)).namelist()
    assert len(names) == len(set(names))
    assert set(NEEDED) <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    modules = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "collimate_ray").rglob("*.py")}
    adapters = {f"collimate_ray/{path.relative_to(CHECKOUT)}" for path in (CHECKOUT / "adapters").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules | adapters
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"collimate_ray"}


def test_the_sdist_holds_what_a_wheel_is_built_from(dist: Path) -> None:
    with tarfile.open(sdist_of(dist)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "adapters/__init__.py"} <= names
    assert {name for name in NEEDED if "/adapters/" not in name} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_works(kind: str, dist: Path, tmp_path: Path) -> None:
    source = wheel_of(dist) if kind == "wheel" else sdist_of(dist)
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--target",
        tmp_path / "lib",
        source,
        cwd=tmp_path,
    )
    check_installed(tmp_path / "lib", tmp_path)


def check_installed(lib: Path, cwd: Path) -> None:
    path = {"PYTHONPATH": str(lib)}
    program = (
        "import collimate_ray.adapters, collimate_ray.cli, importlib.resources as r;"
        "print(collimate_ray.__file__);"
        "assert (r.files('collimate_ray.cli') / 'data' / 'demo.jsonl').is_file()"
    )
    assert run(sys.executable, "-c", program, cwd=cwd, **path).startswith(str(lib))
    assert "exit codes" in run(sys.executable, "-m", "collimate_ray", "grade", "--help", cwd=cwd, **path)


#: Prints what a bare import of the folder says.
BARE_ADAPTERS = """
import sys
try:
    import adapters
except ImportError as error:
    print(error)
else:
    sys.exit("imported " + str(adapters.__file__))
"""


def test_a_bare_adapters_refuses(copy: Path, tmp_path: Path) -> None:
    assert "collimate_ray.adapters" in run(sys.executable, "-c", BARE_ADAPTERS, cwd=copy)
    assert "No module named" in run(sys.executable, "-c", BARE_ADAPTERS, cwd=tmp_path, PYTHONPATH="")


def test_an_editable_install_keeps_the_checkout_off_the_path(copy: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "-e",
        copy,
        cwd=tmp_path,
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    program = "import sys, collimate_ray.adapters as a; print(a.__file__); print('\\n'.join(sys.path))"
    first, *path = run(python, "-c", program, cwd=tmp_path, PYTHONPATH="").splitlines()
    assert Path(first).resolve() == copy / "adapters" / "__init__.py"
    assert str(copy) not in path
    assert "No module named" in run(python, "-c", BARE_ADAPTERS, cwd=tmp_path, PYTHONPATH="")


def test_an_uninstalled_checkout_works(copy: Path) -> None:
    program = "import collimate_ray.adapters as a; print(a.__file__)"
    assert "adapters" in run(sys.executable, "-c", program, cwd=copy, PYTHONPATH=str(copy))
