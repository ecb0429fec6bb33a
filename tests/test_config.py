"""The environment, and the private directory of sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from collimate_ray.config import Environment, daemon_environment, private_dir, read_environment, runtime_dir
from collimate_ray.errors import ConfigError


def test_each_variable_has_its_field() -> None:
    environ = {
        "COLLIMATE_SERVE_SOCKET": "/s",
        "COLLIMATE_API_KEY": "k",
        "COLLIMATE_BASE_URL": "https://b",
        "COLLIMATE_SERVE_URL": "http://u",
        "COLLIMATE_TEMPLATE": "numpy",
        "COLLIMATE_SLOTS": "12",
        "COLLIMATE_REQUIRE_TIER": "full",
    }
    assert read_environment(environ) == Environment("/s", "k", "https://b", "http://u", "numpy", 12, "full")


def test_unset_and_empty_are_the_same() -> None:
    names = ("SERVE_SOCKET", "API_KEY", "BASE_URL", "SERVE_URL", "TEMPLATE", "SLOTS", "REQUIRE_TIER")
    assert read_environment({}) == read_environment({f"COLLIMATE_{name}": "" for name in names}) == Environment()


def test_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLIMATE_TEMPLATE", "here")
    assert read_environment().template == "here"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", " 3", "٣", "1" * 5000])
def test_slots_that_are_no_number_of_slots(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^COLLIMATE_SLOTS: expected a whole number of at least 1, found '"):
        read_environment({"COLLIMATE_SLOTS": text})


@pytest.fixture
def temp_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_runtime_dir_is_private_whatever_the_umask(temp_is: Path) -> None:
    old = os.umask(0o277)
    try:
        path = runtime_dir()
    finally:
        os.umask(old)
    assert path == temp_is / f"collimate-{os.getuid()}" == runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_loose_directory_of_ours_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "loose"
    path.mkdir(mode=0o777)
    private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_what_is_no_directory_of_ours_is_refused(temp_is: Path) -> None:
    place = temp_is / f"collimate-{os.getuid()}"
    elsewhere = temp_is / "elsewhere"
    elsewhere.mkdir()
    place.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="runtime directory: expected"):
        runtime_dir()
    place.unlink()
    place.write_text("")
    with pytest.raises(ConfigError, match="runtime directory: expected"):
        runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_directory_of_another_user_is_refused(temp_is: Path) -> None:
    place = temp_is / f"collimate-{os.getuid()}"
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(ConfigError, match="found drwx------ of uid 12345"):
        runtime_dir()


def test_directory_that_can_not_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        private_dir(tmp_path / "no" / "parent")


def test_daemon_gets_no_secrets_and_finds_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("COLLIMATE_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/before")
    kept = daemon_environment(Path("/check/out"))
    assert kept["PYTHONPATH"] == "/check/out:/before"
    assert kept["PATH"] == os.environ["PATH"]
    assert "secret" not in kept.values()
