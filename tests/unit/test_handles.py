"""Episode handles: they say where an episode sits, and cannot be made or changed without the key."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfarm.core.errors import Rejected
from envfarm.core.rewards import RewardSettings
from envfarm.gateway.handles import Seat, Signer

KEY = bytes(range(32))
SIGNER = Signer(KEY)
names = st.text(max_size=60)
numbers = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.builds(
    RewardSettings,
    weights=st.dictionaries(names, numbers, max_size=4),
    caps=st.dictionaries(names, numbers, max_size=4),
    gamma=numbers,
)
seats = st.builds(
    Seat,
    episode_id=names,
    host_id=names,
    address=names,
    environment=names,
    version=names,
    expires_at=st.floats(min_value=time.time() + 3600, max_value=1e12),
    reward=st.none() | rewards,
)


def seat(**changes):
    fields = {"episode_id": "ep-1", "host_id": "h-1", "address": "unix:/h", "environment": "shop", "version": "1"}
    return Seat(**{**fields, "expires_at": time.time() + 60, **changes})


@given(seats)
@settings(deadline=None, max_examples=50)
def test_a_handle_says_what_was_signed_to_any_gateway_with_the_key(seat):
    assert Signer(KEY).verify(SIGNER.sign(seat)) == seat


@given(st.integers(min_value=0, max_value=200), st.characters(codec="utf-8"))
@settings(deadline=None, max_examples=200)
def test_a_handle_with_any_other_character_is_rejected(position, character):
    handle = SIGNER.sign(seat())
    position %= len(handle)
    changed = handle[:position] + character + handle[position + 1 :]
    if changed != handle:
        with pytest.raises(Rejected):
            SIGNER.verify(changed)


@given(st.text(max_size=300))
@settings(deadline=None, max_examples=200)
def test_no_text_is_a_handle_by_chance(text):
    with pytest.raises(Rejected):
        SIGNER.verify(text)


def test_a_handle_of_another_farm_is_rejected():
    with pytest.raises(Rejected, match="not signed by this farm"):
        Signer(bytes(32)).verify(SIGNER.sign(seat()))


def test_an_expired_handle_is_rejected_by_name():
    with pytest.raises(Rejected, match="ep-1 has expired"):
        SIGNER.verify(SIGNER.sign(seat(expires_at=time.time() - 1)))


def test_a_huge_handle_is_rejected_before_it_is_hashed():
    with pytest.raises(Rejected, match="not an episode handle"):
        SIGNER.verify("h1." + "a" * 10_000_000)


def test_a_signed_payload_of_another_shape_is_rejected():
    payload = "aGVsbG8"
    with pytest.raises(Rejected, match="another version of the farm"):
        SIGNER.verify(f"h1.{payload}.{SIGNER._signature(payload)}")
