"""One trajectory as bytes: a small frame around msgpack, with arrays as raw little-endian buffers.

Frame, all integers little-endian::

    0   4  magic "EFTJ"
    4   1  schema version (``envfarm.core.trajectory.SCHEMA_VERSION``)
    5   1  flags: bit 0 = the body is compressed with zstd
    6   4  length of the body before compression
    10  8  BLAKE2b-64 of everything else: bytes 0-9, then the body as stored
    18  …  the body

Both directions take from 0.1 to 100 ms: in an event loop call them as ``await asyncio.to_thread(encode, trajectory)``.
The compressor and the hash let go of the interpreter's lock, so that really runs beside the loop.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np
import zstandard

from envfarm.core.errors import CorruptRecord
from envfarm.core.trajectory import SCHEMA_VERSION, Trajectory

MAGIC = b"EFTJ"
MAX_BODY = 64 * 1024 * 1024
"""Most bytes of a body before compression; as much as one message on the wire may hold."""
MAX_ITEMS = 400_000
"""Most list entries and map entries in one body: bounds what hostile input can make of few bytes."""
COMPRESS_FROM = 512
"""Bodies below this size are stored as they are."""

_HEAD = struct.Struct("<4sBBI")
_SUM = 8
_ZSTD = 1
_LEVEL = 1  # level 3 costs twice the time for 2 % fewer bytes on token ids and log-probabilities


def encode(trajectory: Trajectory) -> bytes:
    """The frame of ``trajectory``. Raises :class:`CorruptRecord` when it is larger than a frame may be.

    Array contents are kept bit by bit (NaN payloads included); arrays need not be contiguous.
    """
    tree = msgspec.to_builtins(trajectory, builtin_types=(bytes,), enc_hook=_array_to_tree)
    body: bytes = msgpack.packb(tree, use_bin_type=True, unicode_errors="surrogatepass")
    if len(body) > MAX_BODY:
        raise CorruptRecord(
            f"trajectory {trajectory.id} takes {len(body)} bytes, a record may have {MAX_BODY}; "
            "lower Limits.context_tokens, Limits.steps or Limits.result_bytes"
        )
    size, flags = len(body), 0
    if size >= COMPRESS_FROM:
        body, flags = zstandard.ZstdCompressor(level=_LEVEL).compress(body), _ZSTD
    head = _HEAD.pack(MAGIC, SCHEMA_VERSION, flags, size)
    return b"".join((head, _checksum(head, body), body))


def decode(data: bytes) -> Trajectory:
    """The trajectory in a frame. Raises :class:`CorruptRecord` for anything that :func:`encode` did not write.

    Memory stays within a small multiple of the declared body size, whatever the bytes are.
    """
    body = _body(data)
    try:
        tree = _unpack(body)
        trajectory = msgspec.convert(tree, Trajectory, builtin_types=(bytes,), dec_hook=_array_from_tree)
    except CorruptRecord:
        raise
    except (msgspec.ValidationError, msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
        raise CorruptRecord(f"record does not fit schema version {SCHEMA_VERSION}: {error}") from error
    _check_segments(trajectory)
    return trajectory


def _body(data: bytes) -> bytes:
    """Checked and decompressed body of a frame."""
    start = _HEAD.size + _SUM
    if len(data) < start:
        raise CorruptRecord(f"record has {len(data)} bytes, its head alone takes {start}: it was cut short")
    head, body = data[: _HEAD.size], data[start:]
    magic, version, flags, size = _HEAD.unpack(head)
    if magic != MAGIC:
        raise CorruptRecord(f"record begins with {magic!r} instead of {MAGIC!r}: not a trajectory")
    if data[_HEAD.size : start] != _checksum(head, body):
        raise CorruptRecord("record does not match its checksum: it was cut short or changed")
    if version != SCHEMA_VERSION:
        raise CorruptRecord(f"record has schema version {version}, this release reads {SCHEMA_VERSION}: upgrade it")
    if size > MAX_BODY:
        raise CorruptRecord(f"record claims {size} bytes, {MAX_BODY} are allowed")
    if flags & ~_ZSTD:
        raise CorruptRecord(f"record has unknown flags {flags:#04x}")
    if flags & _ZSTD:
        body = _decompress(body, size)
    if len(body) != size:
        raise CorruptRecord(f"record claims a body of {size} bytes and holds {len(body)}")
    return body


def _checksum(head: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_SUM)
    digest.update(body)
    return digest.digest()


def _decompress(body: bytes, size: int) -> bytes:
    """Decompress to exactly ``size`` bytes: zstd allocates what the compressed frame claims, so both must agree."""
    try:
        if zstandard.get_frame_parameters(body).content_size != size:
            raise CorruptRecord(f"compressed body does not hold the {size} bytes that the record claims")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptRecord(f"compressed body is broken: {error}") from error


def _unpack(body: bytes) -> Any:
    """Parse msgpack with a budget of items, taken as containers are closed, so that no input grows past it by much."""
    left = MAX_ITEMS

    def spend(count: int) -> None:
        nonlocal left
        left -= count + 1
        if left < 0:
            raise CorruptRecord(f"record holds more than {MAX_ITEMS} items")

    def on_list(items: list[Any]) -> list[Any]:
        spend(len(items))
        return items

    def on_map(items: dict[Any, Any]) -> dict[Any, Any]:
        spend(len(items))
        return items

    return msgpack.unpackb(
        body,
        raw=False,
        unicode_errors="surrogatepass",
        list_hook=on_list,
        object_hook=on_map,
        max_array_len=min(len(body), MAX_ITEMS),
        max_map_len=min(len(body), MAX_ITEMS),
    )


def _array_to_tree(value: Any) -> list[Any]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot store a {type(value).__name__} in a trajectory")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), little.tobytes()]


def _array_from_tree(kind: Any, tree: Any) -> Any:
    """A writable array of its own, of the dtype that the struct's annotation names."""
    wanted = np.dtype(get_args(get_args(kind)[1])[0]).newbyteorder("<")
    match tree:
        case [str(dtype), [int(length)], bytes(data)] if dtype == wanted.str and length * wanted.itemsize == len(data):
            return np.frombuffer(data, dtype=wanted).astype(wanted.newbyteorder("="))
    raise ValueError(f"array is not one row of {wanted.str}")


def _check_segments(trajectory: Trajectory) -> None:
    for number, s in enumerate(trajectory.segments):
        lengths = {len(a) for a in (s.token_ids, s.mask, s.logprobs, s.versions, s.steps)}
        if len(lengths) > 1:
            raise CorruptRecord(f"segment {number} has arrays of different lengths: {sorted(lengths)}")
