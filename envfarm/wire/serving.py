"""What every server process does with its address: bind it, and write it where whoever started the process looks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from envfarm.core.errors import ConfigError

if TYPE_CHECKING:  # an engine has no gRPC server and need not load gRPC
    import grpc.aio


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Bind ``server`` to ``unix:/path`` or ``host:port`` (port 0: any free one); returns the address that it got.

    Raises :class:`ConfigError` in one line when it cannot be had.
    """
    local = listen.startswith("unix:")
    if not local and not is_port(listen.rpartition(":")[2]):
        raise ConfigError(
            f"--listen {listen!r} is not an address; expected HOST:PORT, the port from 0 (any free one) to 65535"
        )
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {listen}: the address is in use (by another farm?) or not this machine's; "
            "stop that one or choose another --listen"
        ) from None
    return listen if local else f"{listen.rpartition(':')[0]}:{port}"


def is_port(text: str) -> bool:
    """Whether ``text`` is a port's number; gRPC itself takes larger ones modulo 65536 and serves somewhere else."""
    return text.isascii() and text.isdigit() and int(text) <= 65535


def announce(file: Path | None, text: str) -> None:
    """Write ``text`` to an ``--address-file``, all at once and without a line end. Does file I/O.

    Raises :class:`ConfigError` when the file cannot be written.
    """
    if file is None:
        return
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(file)
    except OSError as error:
        raise ConfigError(f"--address-file {file}: {error.strerror}; give a file that can be written") from error
