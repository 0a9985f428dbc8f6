"""An image's files as a stream of tar, made fit for a folder that one user without privileges can use as a root.

Everything belongs to that user afterwards and is readable to it; what only root could use is dropped (device nodes,
file capabilities, setuid bits), and so is what Docker adds itself.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator

BLOCK = tarfile.BLOCKSIZE
_CHUNK = 1 << 20
_DROPPED = {".dockerenv"}
_EMPTIED = ("proc", "sys", "dev")  # mounted over; what Docker puts there is not of the image


class Parts:
    """Bytes that come in parts, as a file to read."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes, fewer only at the end."""
        found = [self._rest[:size]]
        self._rest = self._rest[size:]
        missing = size - len(found[0])
        while missing > 0 and (part := next(self._parts, b"")):
            found.append(part[:missing])
            self._rest = part[missing:]
            missing -= len(found[-1])
        return b"".join(found)


def rewritten(parts: Iterable[bytes], *, owner: int, below: str = "") -> Iterator[bytes]:
    """The tar stream ``parts``, with every entry owned by ``owner`` (user and group) and moved into ``below``."""
    with tarfile.open(fileobj=Parts(parts), mode="r|", bufsize=_CHUNK, errorlevel=1) as source:  # type: ignore[call-overload]
        for entry in source:
            source.members = []  # tarfile keeps every entry that it saw
            data = source.extractfile(entry) if entry.isreg() else None
            if not _adapt(entry, owner, below):
                continue
            yield entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if data is None:
                continue
            left = entry.size
            while left > 0 and (part := data.read(min(left, _CHUNK))):
                left -= len(part)
                yield part
            if left:
                raise tarfile.ReadError(f"{entry.name} breaks off")
            yield bytes(-entry.size % BLOCK)
    yield bytes(2 * BLOCK)


def one_file(name: str, data: bytes, *, owner: int) -> bytes:
    """A tar of a single file."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o444, owner, owner
    return entry.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % BLOCK) + bytes(2 * BLOCK)


def folders(names: Iterable[str], *, owner: int) -> bytes:
    """A tar of empty folders."""
    blocks = []
    for name in names:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, owner, owner
        blocks.append(entry.tobuf(tarfile.PAX_FORMAT))
    return b"".join(blocks) + bytes(2 * BLOCK)


def _adapt(entry: tarfile.TarInfo, owner: int, below: str) -> bool:
    """Change ``entry`` in place; ``False`` when it is not to be there."""
    name = entry.name.removeprefix("./").rstrip("/")
    top, _, rest = name.partition("/")
    if name in _DROPPED or entry.ischr() or entry.isblk() or (top in _EMPTIED and rest):
        return False
    if entry.issparse():
        entry.type = tarfile.REGTYPE
    entry.name = f"{below}/{name}" if below and name not in ("", ".") else below or name or "."
    if entry.islnk():
        entry.linkname = f"{below}/{entry.linkname.removeprefix('./')}" if below else entry.linkname
    entry.uid = entry.gid = owner
    entry.uname = entry.gname = ""
    entry.mode = entry.mode & 0o1777 | (0o700 if entry.isdir() else 0o600)
    entry.pax_headers = {}
    return True
