"""What every backend promises. Subclass it and give it a ``backend`` fixture; a third party's backend can do the same.

The fixture yields a started backend that may make two hosts and serves the environment that ``environment`` names;
``successor`` makes a second backend over the same state, as a gateway does after a restart.
"""

import asyncio
import contextlib
import json

import grpc
import pytest

from envfarm.core.errors import SandboxError
from envfarm.core.sandbox import HostState, Isolation, SandboxProfile
from envfarm.wire.channel import connect
from envfarm.wire.convert.enums import ISOLATION_FROM_PB
from envfarm.wire.mux import MuxClient
from envfarm.wire.v1 import host_pb2, host_pb2_grpc, types_pb2

SECONDS = 60.0


async def inspect(host):
    channel = connect(host.address)
    try:
        stub = host_pb2_grpc.HostServiceStub(channel)
        return await stub.Inspect(host_pb2.InspectRequest(), timeout=SECONDS, wait_for_ready=True)
    finally:
        await channel.close()


async def answers(host):
    channel = connect(host.address)
    try:
        stub = host_pb2_grpc.HostServiceStub(channel)
        await stub.Inspect(host_pb2.InspectRequest(), timeout=2.0)
    except grpc.aio.AioRpcError:
        return False
    else:
        return True
    finally:
        await channel.close()


class BackendSuite:
    """Inherit it as ``class TestMine(BackendSuite)`` with fixtures ``backend``, ``successor`` and ``environment``."""

    async def test_an_acquired_host_is_ready_and_says_its_own_name(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        assert host.state is HostState.READY
        state = await inspect(host)
        assert state.host_id == host.id
        assert state.slots == host.slots > 0
        assert [e.name for e in state.environments] == [environment]

    async def test_an_acquired_host_runs_an_episode(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        channel = connect(host.address)
        stub = host_pb2_grpc.HostServiceStub(channel)
        request = host_pb2.ListTasksRequest(environment=environment, split="train", offset=0, limit=1)
        (task,) = (await stub.ListTasks(request, timeout=SECONDS, wait_for_ready=True)).tasks
        async with MuxClient("host", stub.Drive, host_pb2.DriveRequest) as mux:
            acquire = host_pb2.AcquireSlot(episode_id="e", environment=environment, task=task, seed=1)
            reply = await mux.call(host_pb2.SlotCommand(acquire=acquire), SECONDS)
            assert reply.acquired.messages[-1].role == "user"
            step = host_pb2.RunStep(episode_id="e", index=0, digest=b"d", content="I give up.")
            reply = await mux.call(host_pb2.SlotCommand(step=step), SECONDS)
            assert reply.ran.done
            release = host_pb2.ReleaseSlot(episode_id="e")
            await mux.call(host_pb2.SlotCommand(release=release), SECONDS)
        await channel.close()
        assert (await inspect(host)).busy == 0

    async def test_hosts_are_told_apart_and_listed_until_released(self, backend):
        first, second = await backend.acquire(SandboxProfile()), await backend.acquire(SandboxProfile())
        assert first.id != second.id
        assert first.address != second.address
        assert {h.id for h in await backend.list()} == {first.id, second.id}
        await backend.release(first.id)
        assert [h.id for h in await backend.list()] == [second.id]
        assert not await answers(first)
        assert await answers(second)

    async def test_releasing_an_unknown_host_is_no_error(self, backend):
        await backend.release("host-that-never-was")

    async def test_what_cannot_be_had_is_an_error_with_a_cause(self, backend):
        await backend.acquire(SandboxProfile())
        await backend.acquire(SandboxProfile())
        with pytest.raises(SandboxError, match=r".{20}"):
            await backend.acquire(SandboxProfile())

    async def test_a_recycled_host_is_gone_when_its_successor_is_ready(self, backend):
        old = await backend.acquire(SandboxProfile())
        new = await backend.recycle(old.id, "it is dirty")
        assert new.id != old.id
        assert new.state is HostState.READY
        assert not await answers(old)
        assert [h.id for h in await backend.list()] == [new.id]

    async def test_the_watch_tells_of_an_end_with_its_cause(self, backend):
        host = await backend.acquire(SandboxProfile())
        seen = []

        async def watch():
            async for change in backend.watch():
                seen.append(change)
                if change.id == host.id and change.state is HostState.GONE:
                    return

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await backend.release(host.id)
        async with asyncio.timeout(SECONDS):
            await watching
        assert seen[-1].cause

    async def test_closing_ends_every_host(self, backend):
        hosts = [await backend.acquire(SandboxProfile()), await backend.acquire(SandboxProfile())]
        await backend.close()
        assert [await answers(h) for h in hosts] == [False, False]
        assert list(await backend.list()) == []

    async def test_kept_hosts_are_adopted_by_the_next_backend(self, backend, successor):
        host = await backend.acquire(SandboxProfile())
        await backend.close(keep_hosts=True)
        assert await answers(host)
        adopted = await successor.list()
        assert [(h.id, h.address, h.state) for h in adopted] == [(host.id, host.address, HostState.READY)]
        await successor.close()
        assert not await answers(host)

    async def test_the_isolation_that_a_host_reaches_is_named(self, backend):
        host = await backend.acquire(SandboxProfile())
        assert host.isolation in set(Isolation)


class Episode:
    """An episode of the trial environment on a host, spoken to as the gateway does it."""

    def __init__(self, mux, episode_id, isolation):
        self._mux = mux
        self._id = episode_id
        self._index = 0
        self.isolation = isolation

    async def __call__(self, name, **arguments):
        """Call a tool; returns the text of its result."""
        call = types_pb2.ToolCall(id="c", name=name, arguments=json.dumps(arguments))
        step = host_pb2.RunStep(episode_id=self._id, index=self._index, digest=b"d", calls=[call], order=["c"])
        self._index += 1
        (result,) = (await self._mux.call(host_pb2.SlotCommand(step=step), SECONDS)).ran.results
        return result.content

    async def run(self, command, **options):
        """Exit status, output, errors, and whether it ran out of time."""
        return json.loads(await self("run", command=command, **options))


@contextlib.asynccontextmanager
async def played(host, environment, episode_id="trial"):
    """An open episode of ``environment`` on ``host``."""
    channel = connect(host.address)
    stub = host_pb2_grpc.HostServiceStub(channel)
    async with MuxClient("host", stub.Drive, host_pb2.DriveRequest) as mux:
        request = host_pb2.AcquireSlot(
            episode_id=episode_id, environment=environment, task=types_pb2.Task(id="trial", data="{}"), seed=1
        )
        acquired = (await mux.call(host_pb2.SlotCommand(acquire=request), SECONDS)).acquired
        try:
            yield Episode(mux, episode_id, acquired.isolation)
        finally:
            release = host_pb2.ReleaseSlot(episode_id=episode_id)
            await mux.call(host_pb2.SlotCommand(release=release), SECONDS)
    await channel.close()


class TrialSuite:
    """What commands can and cannot do on hosts of a backend that serves ``trial.py:Trial``.

    Inherit it beside :class:`BackendSuite`, with fixtures ``backend`` and ``environment`` for that environment.
    """

    async def test_a_command_has_a_status_output_errors_and_a_time_limit(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment) as episode:
            assert await episode.run("echo out; echo err >&2; exit 3") == [3, "out\n", "err\n", False]
            code, _, _, timed_out = await episode.run("sleep 30", seconds=0.5)
            assert (code, timed_out) == (None, True)

    async def test_a_command_reaches_neither_a_network_nor_the_hosts_processes_and_is_not_root(
        self, backend, environment
    ):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment) as episode:
            _, devices, _, _ = await episode.run("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
            assert set(devices.split()) <= {"lo"}
            code, _, _, _ = await episode.run("touch /usr/envfarm-was-here")
            assert code != 0
            _, count, _, _ = await episode.run("ls -d /proc/[0-9]* | wc -l")
            assert int(count) < 10
            _, capabilities, _, _ = await episode.run("grep CapEff /proc/self/status")
            assert int(capabilities.split()[1], 16) == 0

    async def test_the_level_that_the_host_names_is_the_one_that_an_episode_reaches(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment) as episode:
            assert ISOLATION_FROM_PB[episode.isolation] is host.isolation

    async def test_files_pass_between_environment_and_commands_and_are_gone_with_the_episode(
        self, backend, environment
    ):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment, "first") as episode:
            await episode("write", path="in.txt", text="given")
            assert (await episode.run("cat in.txt; echo made > out.txt"))[1] == "given"
            assert await episode("read", path="out.txt") == "made\n"
            assert await episode("names") == "in.txt,out.txt"
        async with played(host, environment, "second") as episode:
            assert await episode("names") == ""

    async def test_a_process_goes_on_and_answers(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment) as episode:
            assert await episode("converse", line="hello") == "heard hello\n"

    async def test_a_snapshot_is_restored_in_its_own_slot_and_in_another(self, backend, environment):
        host = await backend.acquire(SandboxProfile())
        async with played(host, environment, "own") as episode, played(host, environment, "other") as other:
            await episode("write", path="kept.txt", text="as it was")
            await episode("keep")
            await episode("write", path="kept.txt", text="changed")
            await episode("go_back")
            assert await episode("read", path="kept.txt") == "as it was"
            await other("go_back")
            assert await other("read", path="kept.txt") == "as it was"
