"""Identifiers: sortable by time, safe in file names, and digests of content."""

from __future__ import annotations

import hashlib
import os
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case: no i, l, o, u


def new_id(prefix: str) -> str:
    """``prefix-`` plus 26 characters: 48 bits of milliseconds, 80 random bits (the layout of a ULID).

    Ids of one process sort by creation time to the millisecond.
    """
    number = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    chars = []
    for _ in range(26):
        chars.append(_ALPHABET[number & 31])
        number >>= 5
    return f"{prefix}-{''.join(reversed(chars))}"


def digest(*parts: bytes) -> str:
    """Hex BLAKE2b-128 over length-prefixed ``parts``; equal only for equal sequences of parts."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.hexdigest()


def derived_seed(*parts: str | int) -> int:
    """A 63-bit seed that depends on every part, the same on every machine and Python version."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def sampling_seed(*parts: str | int) -> int:
    """The lower 31 bits of :func:`derived_seed`: what every inference engine takes for a seed."""
    return derived_seed(*parts) & 0x7FFF_FFFF
