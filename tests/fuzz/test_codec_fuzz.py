"""Mutated frames: every one is refused with a typed error, whether or not its checksum is right.

``ENVFARM_FUZZ_CASES=100000 pytest tests/fuzz/test_codec_fuzz.py`` runs the full size.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct

import msgspec
import numpy as np
import pytest

from envfarm.core.errors import CorruptRecord
from envfarm.core.messages import Diagnosis, Message, ToolCall
from envfarm.core.outcome import Outcome
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import SCHEMA_VERSION, Segment, StepRecord, Trajectory
from envfarm.trajectories import codec

CASES = int(os.environ.get("ENVFARM_FUZZ_CASES", "4000"))
pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(1800)]


def seed_body() -> bytes:
    """Uncompressed msgpack of a small trajectory."""
    n = 6
    s = Segment(
        token_ids=np.arange(n, dtype=np.int32),
        mask=np.ones(n, np.uint8),
        logprobs=np.full(n, -0.5, np.float32),
        versions=np.zeros(n, np.int32),
        steps=np.zeros(n, np.int32),
    )
    message = Message(role="assistant", content="hm", tool_calls=(ToolCall("c", "t", "{}"),))
    step = StepRecord(
        index=0, message=message, replies=(), diagnosis=Diagnosis.OK, parts={"format": 1.0, "tool": None}, reward=0.5
    )
    t = Trajectory(
        id="t",
        run_id="r",
        group_id="r/0",
        group_size=1,
        member=0,
        attempt=0,
        final=True,
        purpose="train",
        environment="e@1",
        split="train",
        task_id="0",
        seed=1,
        policy="p",
        outcome=Outcome.completed(),
        prompt=(Message(role="user", content="hi"),),
        segments=(s,),
        steps=(step,),
        reward=0.5,
        catalogue="c",
        isolation=Isolation.NONE,
        started_at=0.0,
        ended_at=1.0,
        labels={"a": "b"},
    )
    return codec._body(codec.encode(t))


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(5):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.choice((0x00, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xC9, 0xCB, 0xDB, 0xDD, 0xDF, 0xFF))
            case 2:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3 if out:
                del out[at : at + rng.randrange(1, 9)]
            case _ if out:
                out[at:at] = out[rng.randrange(len(out)) :][: rng.randrange(1, 64)]
    return bytes(out)


def test_mutated_frames_are_refused():
    rng = random.Random(1)
    data = codec.encode(codec.decode(framed(seed_body())))
    for _ in range(CASES // 2):
        broken = mutate(rng, data)
        if broken != data:
            with pytest.raises(CorruptRecord):
                codec.decode(broken)


def framed(body: bytes) -> bytes:
    head = struct.pack("<4sBBI", b"EFTJ", SCHEMA_VERSION, 0, len(body))
    return head + hashlib.blake2b(head + body, digest_size=8).digest() + body


def test_mutated_bodies_under_a_right_checksum_are_refused_or_are_trajectories():
    rng = random.Random(2)
    body = seed_body()
    accepted = 0
    for _ in range(CASES // 2):
        try:
            t = codec.decode(framed(mutate(rng, body)))
        except CorruptRecord:
            continue
        accepted += 1
        again = codec.decode(codec.encode(t))
        assert msgspec.structs.replace(again, segments=()).id == t.id
    assert accepted < CASES // 2
