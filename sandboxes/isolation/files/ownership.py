"""Files of an image as if they were the slot user's where they are root's, so that commands may change their copies.

A host that is root runs each slot's commands as a user who owns nothing. An image's files mostly belong to root, who is
the user of most containers, so that programs in there expect to be able to change them. A mount may show other owners
(an *idmapped* mount, Linux 5.12; beneath an overlay, 5.19): root's files become the slot user's, all others stay whose
they are. Where that cannot be had, what is root's cannot be changed by commands.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on all machines
_CLONE, _EMPTY_PATH, _MOVE_EMPTY, _HERE = 1, 0x1000, 4, -100
_IDMAP, _RDONLY, _NOSUID, _NODEV = 0x00100000, 1, 2, 4
_IDS = 65_536
_libc = ctypes.CDLL(None, use_errno=True)


def belonging_to(user: int, image: Path, ground: Path) -> Path:
    """A folder in ``ground`` that shows ``image`` so, for the life of this process's mounts; or ``image`` itself."""
    info = image.stat()
    return _view(user, image, (info.st_dev, info.st_ino), ground)


@cache
def _view(user: int, image: Path, _identity: tuple[int, int], ground: Path) -> Path:
    """Once for each folder, not for each path: another one may come to the same place."""
    view = ground / f"image-{user}-{secrets.token_hex(4)}"
    try:
        view.mkdir(mode=0o711)
        _show(image, view, user)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("commands cannot change what belongs to root in the image: no mount with other owners (%s)", error)
        with contextlib.suppress(OSError):
            view.rmdir()
        return image
    return view


def _show(image: Path, view: Path, user: int) -> None:
    tree = _checked(_libc.syscall(_OPEN_TREE, _HERE, bytes(image), _CLONE | os.O_CLOEXEC))
    try:
        namespace = _namespace(user)
        try:
            attributes = struct.pack("=QQQQ", _IDMAP | _RDONLY | _NOSUID | _NODEV, 0, 0, namespace)
            _checked(_libc.syscall(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, attributes, len(attributes)))
        finally:
            os.close(namespace)
        _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", _HERE, bytes(view), _MOVE_EMPTY))
    finally:
        os.close(tree)


def _namespace(user: int) -> int:
    """A user namespace in which root's id is ``user``'s: all that names a mapping to the kernel."""
    unshare = shutil.which("unshare")
    if unshare is None:
        raise FileNotFoundError("unshare is not on PATH")
    argv = [unshare, "--user", "/bin/cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:  # noqa: S603 - ours
        try:
            if child.stdin is None or child.stdout is None or not (child.stdin.write(b"x") and child.stdout.read(1)):
                raise OSError("no user namespace")
            ids = f"0 {user} 1\n1 1 {user - 1}\n{user + 1} {user + 1} {_IDS - user - 1}\n"
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{name}").write_text(ids)
            return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            child.kill()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
