"""The trajectory codec: exact round trips, every damage found, hostile input bounded."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc

import msgpack
import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import CorruptRecord
from envfarm.core.messages import Diagnosis, Message, ToolCall
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.sandbox import Isolation
from envfarm.core.trajectory import SCHEMA_VERSION, Segment, StepRecord, Trajectory
from envfarm.trajectories import codec
from envfarm.trajectories.codec import decode, encode
from envfarm.trajectories.digest import trajectory_digest

ARRAYS = ("token_ids", "mask", "logprobs", "versions", "steps")


def segment(tokens: int, seed: int = 0) -> Segment:
    random = np.random.default_rng(seed)
    mask = (random.random(tokens) < 0.6).astype(np.uint8)
    return Segment(
        token_ids=random.integers(0, 150_000, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, -random.exponential(0.5, tokens), np.nan).astype(np.float32),
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        steps=np.where(mask == 1, np.arange(tokens) // 256, -1).astype(np.int32),
    )


def step(index: int, text: str = "text") -> StepRecord:
    call = ToolCall(f"call_{index}", "quantity", '{"item": "nails"}')
    return StepRecord(
        index=index,
        message=Message(role="assistant", content=text, tool_calls=(call,)),
        replies=(Message(role="tool", content="12", tool_call_id=call.id, name="quantity"),),
        diagnosis=Diagnosis.OK,
        parts={"format": 1.0, "tool": None, "progress": 0.0},
        reward=1.0,
        sampled_tokens=12,
        engine_seconds=0.5,
    )


def trajectory(tokens: int = 300, length: int = 3, **fields) -> Trajectory:
    base = Trajectory(
        id="trajectory-1",
        run_id="run-1",
        group_id="run-1/4",
        group_size=8,
        member=2,
        attempt=0,
        final=True,
        purpose="train",
        environment="stockroom@1",
        split="train",
        task_id="task-4",
        seed=2**63 - 1,
        policy="policies/stockroom",
        outcome=Outcome.completed(),
        prompt=(Message(role="system", content="s"), Message(role="user", content="how many nails?")),
        segments=(segment(tokens),),
        steps=tuple(step(i) for i in range(length)),
        reward=1.25,
        catalogue="0123",
        isolation=Isolation.BWRAP,
        started_at=1.0,
        ended_at=2.5,
        labels={"owner": "me"},
    )
    return msgspec.structs.replace(base, **fields)


def plain(t: Trajectory) -> Trajectory:
    return msgspec.structs.replace(t, segments=())


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert plain(a) == plain(b)
    assert len(a.segments) == len(b.segments)
    for left, right in zip(a.segments, b.segments, strict=True):
        for name in ARRAYS:
            one, other = getattr(left, name), getattr(right, name)
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


def frame(tree: object, *, size: int | None = None, version: int = SCHEMA_VERSION, compress: bool = False) -> bytes:
    """A frame with a right checksum around anything."""
    body = tree if isinstance(tree, bytes) else msgpack.packb(tree)
    head = struct.pack("<4sBBI", b"EFTJ", version, int(compress), len(body) if size is None else size)
    stored = zstandard.ZstdCompressor().compress(body) if compress else body
    return head + hashlib.blake2b(head + stored, digest_size=8).digest() + stored


def tree_of(t: Trajectory) -> dict:
    return msgpack.unpackb(codec._body(encode(t)))


texts = st.text(max_size=20)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    tool_call_id=texts,
    name=texts,
    reasoning=texts,
)
numbers = st.none() | st.floats(allow_nan=False)
steps = st.builds(
    StepRecord,
    index=st.integers(0, 1000),
    message=messages,
    replies=st.lists(messages, max_size=2).map(tuple),
    diagnosis=st.sampled_from(Diagnosis),
    parts=st.dictionaries(texts, numbers, max_size=4),
    reward=numbers,
)
trajectories = st.builds(
    trajectory,
    tokens=st.integers(0, 400),
    length=st.just(0),
    prompt=st.lists(messages, max_size=3).map(tuple),
    segments=st.lists(st.builds(segment, st.integers(0, 300), st.integers(0, 9)), max_size=3).map(tuple),
    reward=numbers,
    seed=st.integers(0, 2**63 - 1),
    outcome=st.builds(Outcome, st.sampled_from(OutcomeKind), texts),
    isolation=st.sampled_from(Isolation),
    labels=st.dictionaries(texts, texts, max_size=3),
    started_at=st.floats(allow_nan=False),
)


@settings(deadline=None, max_examples=60)
@given(trajectories, st.lists(steps, max_size=3))
def test_every_trajectory_comes_back_exactly(t, made):
    t = msgspec.structs.replace(t, steps=tuple(made))
    assert_same(decode(encode(t)), t)


def test_nan_log_probabilities_keep_their_bits():
    odd = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000], dtype=np.uint32).view(np.float32)
    s = msgspec.structs.replace(segment(4), logprobs=odd)
    assert decode(encode(trajectory(segments=(s,)))).segments[0].logprobs.tobytes() == odd.tobytes()


def test_strided_and_big_endian_arrays_are_stored_by_value():
    s = segment(200)
    halved = Segment(**{name: getattr(s, name)[::2] for name in ARRAYS})
    swapped = Segment(**{name: getattr(s, name).astype(getattr(s, name).dtype.newbyteorder(">")) for name in ARRAYS})
    assert (decode(encode(trajectory(segments=(halved,)))).segments[0].token_ids == s.token_ids[::2]).all()
    assert (decode(encode(trajectory(segments=(swapped,)))).segments[0].versions == s.versions).all()


def test_decoded_arrays_are_writable_and_their_own():
    s = decode(encode(trajectory())).segments[0]
    assert all(getattr(s, name).flags.writeable for name in ARRAYS)


def test_large_bodies_are_compressed_and_small_ones_are_not():
    large, small = encode(trajectory(4096)), encode(trajectory(0, 0, segments=(), prompt=(), labels={}))
    assert (large[5], small[5]) in {(1, 0), (1, 1)}
    assert len(large) < 4096 * 17 * 0.6


@pytest.mark.parametrize("tokens", [0, 300])
def test_every_flipped_byte_is_found(tokens):
    data = encode(trajectory(tokens, 1))
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptRecord):
            decode(bytes(broken))


def test_every_cut_and_every_extension_is_found():
    data = encode(trajectory(100, 1))
    for end in range(len(data)):
        with pytest.raises(CorruptRecord):
            decode(data[:end])
    with pytest.raises(CorruptRecord):
        decode(data + b"\0")


def test_a_newer_schema_is_named_as_such():
    with pytest.raises(CorruptRecord, match="schema version 9"):
        decode(frame({}, version=9))


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"\xc1",
        b"\x80\x80",
        {},
        [],
        None,
        {"id": 7},
        b"\x91" * 5_000,
        b"\x81\xa1a" * 5_000,
        {1: 2},
        msgpack.Timestamp(1),
    ],
)
def test_a_body_that_is_no_trajectory_is_refused(tree):
    with pytest.raises(CorruptRecord):
        decode(frame(tree))


@pytest.mark.parametrize(
    "array",
    [
        None,
        [],
        ["<i8", [4], bytes(32)],
        ["<i4", [4], bytes(15)],
        ["<i4", [2, 2], bytes(16)],
        ["<i4", [-4], bytes(16)],
        ["<i4", [2**62], bytes(16)],
        ["|O", [2], bytes(16)],
        ["<i4", 4, bytes(16)],
        ["<i4", [4], "text"],
    ],
)
def test_an_array_of_another_kind_is_refused(array):
    tree = tree_of(trajectory(4))
    tree["segments"][0]["token_ids"] = array
    with pytest.raises(CorruptRecord):
        decode(frame(tree))


def test_arrays_of_different_lengths_are_refused():
    tree = tree_of(trajectory(4))
    tree["segments"][0]["mask"] = ["|u1", [3], bytes(3)]
    with pytest.raises(CorruptRecord, match="different lengths"):
        decode(frame(tree))


def test_a_trajectory_too_large_for_a_record_is_refused_with_the_limits_to_lower(monkeypatch):
    monkeypatch.setattr(codec, "MAX_BODY", 1000)
    with pytest.raises(CorruptRecord, match=r"lower Limits\.context_tokens"):
        encode(trajectory(1000))


def peak_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_is_not_unpacked():
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    for claimed in (1000, 1 << 20, 1 << 28):
        head = struct.pack("<4sBBI", b"EFTJ", SCHEMA_VERSION, 1, claimed)
        data = head + hashlib.blake2b(head + bomb, digest_size=8).digest() + bomb
        assert peak_of(data) < 4 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
        b"\xdd" + struct.pack(">I", 8_000_000) + b"\xc0" * 8_000_000,
        b"\xdd" + struct.pack(">I", 390_000) + b"\x9f" * 390_000,
        b"\xdd" + struct.pack(">I", 380_000) + b"\x91\x90" * 4_000_000,
        b"\xdf" + struct.pack(">I", 390_000) + b"".join(b"\xa3%3d\xc0" % (i % 1000) for i in range(390_000)),
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=["claims more than it has", "wide", "lists in a list", "many small lists", "a large map", "huge bytes"],
)
def test_bodies_that_grow_when_parsed_stay_within_bounds(body):
    assert peak_of(frame(body, compress=True)) < 4 * codec.MAX_BODY


def test_a_step_of_256_tokens_takes_at_most_8_kib_in_memory_and_on_disk():
    steps = 64
    data = encode(trajectory(256 * steps, steps))
    tracemalloc.start()
    kept = decode(data)
    in_memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept.steps) == steps
    assert in_memory / steps < 8192
    assert len(data) / steps < 8192


def test_the_digest_leaves_out_ids_and_times():
    one = trajectory()
    other = msgspec.structs.replace(
        one,
        id="b",
        run_id="b",
        group_id="b",
        started_at=9.0,
        ended_at=10.0,
        isolation=Isolation.POD,
        attempt=3,
        labels={},
        steps=tuple(
            msgspec.structs.replace(
                s,
                engine_seconds=3.0,
                message=msgspec.structs.replace(
                    s.message, tool_calls=(ToolCall("x", "quantity", '{"item": "nails"}'),)
                ),
                replies=(msgspec.structs.replace(s.replies[0], tool_call_id="x"),),
            )
            for s in one.steps
        ),
    )
    assert trajectory_digest(one) == trajectory_digest(other)
    assert trajectory_digest(decode(encode(one))) == trajectory_digest(one)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"reward": 1.5},
        {"reward": None},
        {"outcome": Outcome.truncated("steps")},
        {"segments": (segment(300, seed=1),)},
        {"steps": ()},
        {"steps": (step(0, "other"), step(1), step(2))},
        {"prompt": ()},
    ],
)
def test_the_digest_tells_different_content_apart(change):
    assert trajectory_digest(trajectory(**change)) != trajectory_digest(trajectory())
