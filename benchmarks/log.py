"""The trajectory log: groups of 8 x 2,048 tokens with log-probabilities, appended durably, beside the disk itself.

Payload bytes are counted as stored (compressed). The disk's own rate is 1 MiB writes, each followed by fdatasync, in
the same folder, before and after: what else runs on the machine slows both.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import msgspec
import numpy as np

from envfarm.core.log import LogRecord
from envfarm.core.messages import Diagnosis, Message, ToolCall
from envfarm.core.outcome import Outcome
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import Segment, StepRecord, Trajectory, TrajectoryHeader
from envfarm.gateway.intake import TrajectoryServicer
from envfarm.trajectories.codec import decode, encode
from envfarm.trajectories.sqlite_log import SqliteLog
from envfarm.wire.channel import connect, serve_options
from envfarm.wire.log_client import LogClient
from envfarm.wire.v1.trajectory_pb2_grpc import add_TrajectoryServiceServicer_to_server

MEMBERS, TOKENS, STEPS = 8, 2_048, 8
IN_FLIGHT = 32
SECONDS = 3.0
MEBIBYTE = 1 << 20


def example(seed: int) -> Trajectory:
    """2,048 tokens in 8 steps, 60 % of them sampled, with messages of about 200 characters."""
    random = np.random.default_rng(seed)
    mask = (random.random(TOKENS) < 0.6).astype(np.uint8)
    segment = Segment(
        token_ids=random.integers(0, 150_000, TOKENS).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, -random.exponential(0.5, TOKENS), np.nan).astype(np.float32),
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        steps=np.where(mask == 1, np.arange(TOKENS) * STEPS // TOKENS, -1).astype(np.int32),
    )
    step = StepRecord(
        index=0,
        message=Message(role="assistant", content="a" * 200, tool_calls=(ToolCall("call_0", "quantity", "{}"),)),
        replies=(Message(role="tool", content="b" * 200, tool_call_id="call_0"),),
        diagnosis=Diagnosis.OK,
        parts={"format": 1.0, "tool": None, "progress": 0.25},
        reward=1.0,
    )
    return Trajectory(
        id="t",
        run_id="bench",
        group_id="g",
        group_size=MEMBERS,
        member=0,
        attempt=0,
        final=True,
        purpose="train",
        environment="stockroom@1",
        split="train",
        task_id="0",
        seed=seed,
        policy="p",
        outcome=Outcome.completed(),
        prompt=(Message(role="user", content="c" * 200),),
        segments=(segment,),
        steps=tuple(msgspec.structs.replace(step, index=i) for i in range(STEPS)),
        reward=1.0,
        catalogue="0",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
    )


class Groups:
    """An endless supply of groups with fresh ids; the payloads are encoded beforehand."""

    def __init__(self) -> None:
        examples = [example(seed) for seed in range(2 * MEMBERS)]
        self._encoded = [(TrajectoryHeader.of(t), encode(t)) for t in examples]
        self.made = 0
        self.bytes = 0

    def next(self) -> list[LogRecord]:
        """The records of a group that was not seen before."""
        number, self.made = self.made, self.made + 1
        records = []
        for member in range(MEMBERS):
            header, payload = self._encoded[(number * MEMBERS + member) % len(self._encoded)]
            header = msgspec.structs.replace(header, id=f"{number}-{member}", group_id=f"bench/{number}", member=member)
            records.append(LogRecord(header=header, payload=payload))
            self.bytes += len(payload)
        return records


def disk_rate(folder: Path, seconds: float = 0.5) -> float:
    """MB/s of 1 MiB writes to a new file, each made durable."""
    block = os.urandom(MEBIBYTE)
    file = os.open(folder / "blocks", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            os.write(file, block)
            os.fdatasync(file)
            count += 1
        return count * MEBIBYTE / (time.perf_counter() - start) / 1e6
    finally:
        os.close(file)
        (folder / "blocks").unlink()


async def append_for(seconds: float, groups: Groups, append: object) -> float:
    """Append with 32 groups in flight until the time is up; returns the seconds until all was acknowledged."""
    start = time.perf_counter()

    async def sender() -> None:
        while time.perf_counter() - start < seconds:
            await append(groups.next())  # type: ignore[operator]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(sender())
    return time.perf_counter() - start


async def in_process(folder: Path) -> dict[str, float]:
    """Append, then read, with the disk's own rate before and after."""
    log, groups = SqliteLog(folder / "farm.db"), Groups()
    before = disk_rate(folder)
    took = await append_for(SECONDS, groups, log.append)
    disk = (before + disk_rate(folder)) / 2
    start, after = time.perf_counter(), 0
    while page := await log.groups("bench", purpose="train", after=after, limit=64, timeout=0):
        after = page[-1].position
    read = time.perf_counter() - start
    await log.close()
    rate = groups.bytes / took / 1e6
    return {
        "log_groups_per_s": groups.made / took,
        "log_mb_per_s": rate,
        "log_disk_mb_per_s": disk,
        "log_share_of_disk": rate / disk,
        "log_read_groups_per_s": after / read,
    }


async def read_until(client: LogClient, groups: Groups, ended: asyncio.Event) -> int:
    """Read until senders have ended and all of theirs was read; returns the last position, committed."""
    async with aclosing(client.subscribe("bench", "bench")) as stream:
        async for group in stream:
            if ended.is_set() and group.position == groups.made:
                await client.commit("bench", "bench", group.position)
                return group.position
    raise AssertionError("a subscription has no end")


async def over_grpc(folder: Path) -> dict[str, float]:
    """In and out through one server in this process: senders append while a subscriber reads and commits."""
    log, groups = SqliteLog(folder / "served.db"), Groups()
    server = grpc.aio.server(options=serve_options())
    add_TrajectoryServiceServicer_to_server(TrajectoryServicer(log), server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    async with connect(f"unix:{folder}/socket") as channel, LogClient(channel) as client, asyncio.timeout(60):
        start = time.perf_counter()
        reading = asyncio.create_task(read_until(client, groups, ended := asyncio.Event()))
        await append_for(SECONDS, groups, client.append)
        ended.set()
        await client.append(groups.next())  # one more group, so that a reader who has read all sees the end
        read = await reading
        took = time.perf_counter() - start
    await server.stop(0)
    await log.close()
    return {"log_grpc_groups_per_s": read / took, "log_grpc_mb_per_s": groups.bytes / took / 1e6}


def codec_cost() -> dict[str, float]:
    """Milliseconds per trajectory of 2,048 tokens, and stored bytes per step of 256."""
    trajectory, rounds = example(0), 100
    start = time.perf_counter()
    for _ in range(rounds):
        data = encode(trajectory)
    encoded = time.perf_counter()
    for _ in range(rounds):
        decode(data)
    decoded = time.perf_counter()
    return {
        "log_encode_ms": (encoded - start) / rounds * 1e3,
        "log_decode_ms": (decoded - encoded) / rounds * 1e3,
        "log_bytes_per_step": len(data) / STEPS,
    }


def measure() -> dict[str, float]:
    """Figures by name; takes about ten seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(in_process(Path(folder))) | asyncio.run(over_grpc(Path(folder))) | codec_cost()


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:24} {value:12.2f}")
