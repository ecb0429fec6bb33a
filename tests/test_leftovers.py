"""The fixture that all tests lean on must itself see what is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from leftovers import Watch

from collimate_ray.config import runtime_dir

SLEEP = [sys.executable, "-I", "-S", "-c", "input()"]


def test_nothing_is_left_after_nothing(no_leftovers: Watch) -> None:
    assert no_leftovers.left(0) == []


def test_descriptor_file_socket_and_thread_are_seen(no_leftovers: Watch) -> None:
    path = runtime_dir() / "forgotten.sock"
    gone = threading.Event()
    thread = threading.Thread(target=gone.wait, name="collimate-forgotten")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        thread.start()
        left = "\n".join(no_leftovers.left(0))
    path.unlink()
    gone.set()
    thread.join()
    for kind in (f"files: {path}", f"sockets: {path}", "descriptors: fd", "threads: collimate-forgotten"):
        assert kind in left


def test_child_is_seen(no_leftovers: Watch) -> None:
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as child:
        left = no_leftovers.left(0)
    assert any(line.startswith("processes:") and f"pid {child.pid}," in line for line in left)


def test_orphan_is_seen_by_its_environment(no_leftovers: Watch) -> None:
    read, write = os.pipe()
    starter = (
        "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, start_new_session=True)"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", starter, *SLEEP], stdin=read, check=True)
    os.close(read)
    left = no_leftovers.left(0)
    os.close(write)  # the orphan ends at the end of its input
    assert any(line.startswith("processes:") for line in left)
