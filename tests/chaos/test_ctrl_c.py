"""A farm that a person ends, or that loses a part: it ends in order, says why, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
MARK = "ENVFARM_TEST_FAMILY"
SECONDS = 60.0


def heard() -> None:
    """A background job of a shell ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Demo:
    """A demo in a session of its own, all of whose processes carry a mark by which they are found again."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        self.stderr = folder / "stderr"
        self._mark = f"{MARK}={folder}".encode()
        argv = [sys.executable, "-m", "envfarm.cli.main", "demo", "--seconds", "60", "--out", str(self.out)]
        with self.stderr.open("wb") as sink:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
                env={**os.environ, MARK: str(folder), "TMPDIR": str(self.scratch)},
                preexec_fn=heard,  # noqa: PLW1509 - this process has one thread here
            )  # fmt: skip

    def family(self) -> dict[int, str]:
        """Command lines of all its processes, the demo's own included."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def pid_of(self, words: str) -> int:
        return next((pid for pid, line in self.family().items() if words in line and pid != self.process.pid), 0)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < end, f"{what}: {self.stderr.read_text()}"
            time.sleep(0.02)

    def said(self) -> str:
        return self.stderr.read_text()

    def assert_nothing_is_left(self) -> None:
        assert self.family() == {}
        assert [p.name for p in self.scratch.glob("envfarm*")] == []
        assert str(self.out) not in Path("/proc/mounts").read_text()
        database = self.out / "farm.db"
        if database.exists():
            with contextlib.closing(sqlite3.connect(database)) as connection:
                assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    started = Demo(tmp_path)
    yield started
    for pid in started.family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    started.process.wait(SECONDS)


MOMENTS: dict[str, Callable[[Demo], object]] = {
    "while its processes start": lambda demo: demo.pid_of("main gateway") and demo.pid_of("main engine"),
    "while it measures": lambda demo: demo.pid_of("main worker"),
}


def loading(demo: Demo) -> bool:
    """Whether the commands are being loaded: a library that only they need is mapped."""
    with contextlib.suppress(OSError):
        return "numpy" in Path(f"/proc/{demo.process.pid}/maps").read_text()
    return False


@pytest.mark.parametrize(
    ("number", "times", "status"), [(signal.SIGINT, 1, 130), (signal.SIGINT, 4, 130), (signal.SIGTERM, 1, 143)]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_everything_without_a_trace(
    demo: Demo, moment: str, number: signal.Signals, times: int, status: int
) -> None:
    demo.until(lambda: MOMENTS[moment](demo), moment)
    for _ in range(times):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.process.pid, number)
    assert demo.process.wait(SECONDS) == status
    assert "Traceback" not in demo.said()
    demo.assert_nothing_is_left()


def test_ctrl_c_while_the_command_loads_leaves_no_trace(demo: Demo) -> None:
    demo.until(lambda: loading(demo), "loading")
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(SECONDS) in (130, -signal.SIGINT)
    assert "Traceback" not in demo.said()
    demo.assert_nothing_is_left()


@pytest.mark.parametrize(("words", "name"), [("main gateway", "gateway"), ("main engine", "engine")])
def test_a_process_that_is_killed_while_the_farm_starts_ends_the_demo_with_its_name(
    demo: Demo, words: str, name: str
) -> None:
    demo.until(lambda: demo.pid_of(words) and (demo.out / "farm.db").exists(), name)
    os.kill(demo.pid_of(words), signal.SIGKILL)
    assert demo.process.wait(SECONDS) == 1
    assert f"{name} ended with status -9; its log" in demo.said()
    assert "Traceback" not in demo.said()
    assert [line for line in demo.family().values() if "sandboxes.host" not in line] == []
