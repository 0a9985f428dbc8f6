"""The gateway's state folder: the token that clients show, the key that signs handles, and a lock on both."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envfarm.core.errors import ConfigError


@dataclass(frozen=True)
class StateFolder:
    """``path`` has mode 0700, the files in it 0600."""

    path: Path
    token: str
    key: bytes

    @property
    def database(self) -> Path:
        """The SQLite file of log and runs."""
        return self.path / "farm.db"


@contextmanager
def state_folder(path: Path) -> Iterator[StateFolder]:
    """Open the folder, make what is missing, keep other gateways out until the end.

    Raises :class:`ConfigError` when it cannot be used or another gateway uses it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        with _locked(path / "gateway.lock", path):
            token = _secret(path / "token").strip()
            key = bytes.fromhex(_secret(path / "key").strip())
            if not token or len(key) < 32:
                raise ConfigError(f"{path}: 'token' or 'key' is damaged; remove both to have new ones made")
            yield StateFolder(path, token, key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use the state folder {path}: {error}") from error


@contextmanager
def _locked(file: Path, folder: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise ConfigError(
                f"the state folder {folder} is in use by another gateway (process {owner}); "
                "stop that one or choose another --state"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _secret(file: Path) -> str:
    """The text of ``file``, made of 256 random bits first when it does not exist; never seen half written."""
    if not file.exists():
        scratch = file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_hex(32) + "\n")
            out.flush()
            os.fsync(out.fileno())
        scratch.rename(file)
    return file.read_text()
