"""What is kept of a stream of unknown length: its head and its tail."""

from __future__ import annotations


class HeadTail:
    """Keeps at most ``limit`` bytes of what is fed to it, half from either end, in memory bounded by ``2 * limit``."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._tail_room:
            return
        self._tail += data[-self._tail_room :]
        if len(self._tail) > 2 * self._tail_room:
            del self._tail[: -self._tail_room]

    @property
    def truncated(self) -> bool:
        """Whether bytes were dropped."""
        return self.total > self._head_room + self._tail_room

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail; they follow one another unless bytes were dropped."""
        return bytes(self._head), bytes(self._tail[-self._tail_room :]) if self._tail_room else b""

    def value(self) -> bytes:
        """Head and tail, with a notice between them when bytes were dropped."""
        head, tail = self.parts
        if not self.truncated:
            return head + tail
        return head + f"\n[... {self.total - len(head) - len(tail)} bytes cut ...]\n".encode() + tail
