"""Episode handles: they name the host that holds the episode, and are signed, so any gateway with the key can route.

``h1.<payload>.<signature>``, both base64url; the payload is msgpack of a :class:`Seat`, the signature is HMAC-SHA256.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time

import msgspec

from envfarm.core.errors import Rejected
from envfarm.core.rewards import RewardSettings

VERSION = "h1"
MOST_CHARACTERS = 8192


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where an episode sits.

    ``environment`` and ``version`` are those it was opened with; ``expires_at`` is in seconds since the epoch;
    ``reward`` is what the run puts in place of the environment's own weights.
    """

    episode_id: str
    host_id: str
    address: str
    environment: str
    version: str
    expires_at: float
    reward: RewardSettings | None = None


class Signer:
    """Makes and checks handles with one key of at least 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._decoder = msgspec.msgpack.Decoder(Seat)

    def sign(self, seat: Seat) -> str:
        """The handle of ``seat``."""
        payload = _text(msgspec.msgpack.encode(seat))
        return f"{VERSION}.{payload}.{self._signature(payload)}"

    def verify(self, handle: str) -> Seat:
        """The seat behind ``handle``. Raises :class:`Rejected` when it is forged, foreign, malformed or expired."""
        version, _, rest = handle.partition(".") if len(handle) <= MOST_CHARACTERS else ("", "", "")
        payload, _, signature = rest.partition(".")
        if version != VERSION or not signature.isascii() or not payload.isascii():
            raise Rejected("not an episode handle; expected the text that Open returned")
        if not hmac.compare_digest(signature, self._signature(payload)):
            raise Rejected("the episode handle is not signed by this farm; was the gateway's state folder replaced?")
        try:
            seat = self._decoder.decode(_bytes(payload))
        except (msgspec.DecodeError, binascii.Error, ValueError):
            raise Rejected(
                "the episode handle was made by another version of the farm; open the episode anew"
            ) from None
        if time.time() > seat.expires_at:
            raise Rejected(f"the handle of episode {seat.episode_id} has expired; open the episode anew")
        return seat

    def _signature(self, payload: str) -> str:
        return _text(hmac.digest(self._key, f"{VERSION}.{payload}".encode(), "sha256"))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
