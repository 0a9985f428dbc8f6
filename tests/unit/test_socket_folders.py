"""Folders made for sockets with long paths go with the host, and those of killed hosts are swept."""

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from sandboxes.hosting import sockets


@pytest.fixture
def folders(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="envfarm-test-", dir="/tmp") as short:  # the usual one is too deep
        monkeypatch.setattr(sockets, "_FOLDERS", Path(short))
        yield Path(short)


def bound(path):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    return made


def aged(folder):
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))


def test_a_short_path_stays_and_a_long_one_gets_a_folder_that_goes_with_its_socket(folders):
    short = folders / "s"
    assert sockets.socket_path(short) == (short, "")
    path, folder = sockets.socket_path(folders / ("x" * 120) / "host-1.sock")
    assert str(path.parent) == folder
    bound(path).close()
    sockets.remove_socket(path)
    assert list(folders.iterdir()) == []


def test_only_old_folders_where_nobody_listens_are_swept(folders):
    paths = [sockets.socket_path(folders / ("x" * 120) / "host-1.sock")[0] for _ in range(3)]
    dead, alive, young = paths
    bound(dead).close()
    bound(young).close()
    with bound(alive) as listening:
        listening.listen(1)
        aged(dead.parent)
        aged(alive.parent)
        assert sockets.sweep() == 1
    assert sorted(folders.iterdir()) == sorted([alive.parent, young.parent])
