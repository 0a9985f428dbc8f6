"""A farm that runs already: a worker that serves every run, and clients that have episodes run there."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

SECONDS = 60.0
ENVFARM = [sys.executable, "-m", "envfarm.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def until(condition, process=None, log=None):
    end = time.monotonic() + SECONDS
    while not condition():
        assert process is None or process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text() if log else "too late"
        time.sleep(0.05)


@contextlib.contextmanager
def started(folder, name, *words, addressed=True):
    log, address = folder / f"{name}.log", folder / f"{name}.address"
    argv = [*ENVFARM, *words, *(["--address-file", str(address)] if addressed else [])]
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, start_new_session=True, env=ENVIRONMENT)
    try:
        if addressed:
            until(address.exists, process, log)
        yield address.read_text().strip() if addressed else log
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(25)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("farm")
    with contextlib.ExitStack() as stack:
        gateway = ["gateway", "--listen", "127.0.0.1:0", "--state", str(folder / "state"), "--slots", "16"]
        address = stack.enter_context(
            started(folder, "gateway", *gateway, "--environment", "stockroom", "--drain-seconds", "1")
        )
        engine = stack.enter_context(started(folder, "engine", "engine", "--model", "stockroom"))
        url = engine if engine.startswith("http") else f"http://{engine}"
        client = ["--gateway", address, "--token-file", str(folder / "state" / "token")]
        worker = ["worker", *client, "--engine", url, "--tokenizer", "stockroom", "--concurrency", "8", "--grace", "2"]
        log = stack.enter_context(started(folder, "worker", *worker, addressed=False))
        yield client, url, log


def rollout(client, *words):
    argv = [*ENVFARM, "rollout", *client, "--json", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_farms_workers_run_just_the_episodes_that_a_client_asks_for(farm):
    client, _, _ = farm
    status, rows, told = rollout(client, "--env", "stockroom", "-n", "5")
    assert status == 0, told
    assert len({row["task"] for row in rows}) == 5
    assert {row["trajectory"].split("/")[1].split(".")[0] for row in rows} == set("01234")
    assert all(row["outcome"].startswith(("completed", "truncated", "policy_failed")) for row in rows)


def test_two_clients_at_once_each_get_their_own_episodes(farm):
    client, _, _ = farm

    async def both():
        return await asyncio.gather(
            *(asyncio.to_thread(rollout, client, "--env", "stockroom", "-n", "4", "--seed", s) for s in "12")
        )

    results = asyncio.run(both())
    assert [(status, len(rows)) for status, rows, _ in results] == [(0, 4), (0, 4)]
    ids = [row["trajectory"] for _, rows, _ in results for row in rows]
    assert len(set(ids)) == 8


def test_with_engines_of_its_own_a_client_drives_and_the_workers_leave_its_run_alone(farm):
    client, url, log = farm
    before = log.read_text().count("works for run")
    status, rows, told = rollout(client, "--env", "stockroom", "-n", "3", "--engine", url)
    assert (status, len(rows)) == (0, 3), told
    assert log.read_text().count("works for run") == before


def test_an_environment_that_is_not_there_is_told_at_once(farm):
    client, _, _ = farm
    status, rows, told = rollout(client, "--env", "stockrom", "-n", "1")
    assert (status, rows) == (1, [])
    assert "stockroom" in told
