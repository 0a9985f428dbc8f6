"""What a host's container is made of: pure data, as the engine's API takes it.

Inside, ``envfarm host`` runs as a user who owns nothing, without a capability, without a network, on a read-only root.
It confines commands with bubblewrap, which needs namespaces and mounts: hence a seccomp profile of our own, and a
``/proc`` without Docker's masks, over which the kernel would refuse a fresh one to a new namespace.

Bounds, from the profile's and the host's own share (``HOST_*``)::

    memory = HOST_MEMORY_BYTES + slots x (memory_bytes + disk_bytes)   no swap; at most the machine's
    pids   = HOST_PIDS + slots x (pids + SLOT_PIDS)                    threads count; SLOT_PIDS is for bubblewrap
    cpus   = HOST_CPUS + slots x cpus                                  at most the machine's

``disk_bytes`` is memory because workspaces lie in tmpfs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from sandboxes.docker.engine import EngineFacts
from sandboxes.docker.labels import HostRecord
from sandboxes.docker.sources import Sources

HOST_MEMORY_BYTES = 512 << 20
HOST_PIDS = 256
SLOT_PIDS = 8
HOST_CPUS = 1.0
SOCKETS = "/run/envfarm"  # the host's socket and address file, in a folder that the gateway shares
SOCKET = "host.sock"
ADDRESS = "address"
IMAGE = "/image"  # the volume with an image's files
_TMP_BYTES = 256 << 20
_RUN_BYTES = 16 << 20
_OPENED_BYTES = 1 << 20
_OOM_SCORE = 300  # rather a host than the gateway or the engine
_LOG = {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}}
_ULIMITS = [{"Name": "core", "Soft": 0, "Hard": 0}]


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One host to be. ``image``: id of the host image; ``user``: user and group id in there.

    ``volume``: holds the files of the profile's image, in its folder ``root`` as seen from inside. ``sources``: what
    environments in files need. ``reload``: the host ends when the code of its environments changes.
    """

    record: HostRecord
    image: str
    user: int
    volume: str = ""
    root: str = ""
    runtime: str = ""
    mounts: Sequence[str] = ()
    sources: Sources = Sources()
    reload: bool = False


def name(host_id: str) -> str:
    """Of the container, so that it can be found although nobody got to see its id."""
    return f"envfarm-{host_id}"


def config(spec: HostSpec, facts: EngineFacts) -> dict[str, Any]:
    """The body of the engine's request to create the container."""
    return {
        "Image": spec.image,
        "User": f"{spec.user}:{spec.user}",
        "Entrypoint": ["envfarm", "host"],
        "Cmd": _arguments(spec),
        "Env": ["HOME=/tmp", "TMPDIR=/tmp"],
        "Labels": spec.record.labels(),
        "NetworkDisabled": True,
        **({"WorkingDir": spec.sources.workdir} if spec.sources.workdir else {}),
        "HostConfig": _host_config(spec, facts),
    }


def _arguments(spec: HostSpec) -> list[str]:
    record = spec.record
    words = ["--id", record.id, "--listen", f"unix:{SOCKETS}/{SOCKET}", "--address-file", f"{SOCKETS}/{ADDRESS}"]
    words += ["--slots", str(record.slots), "--lease", str(record.lease), "--inside", record.inside.value]
    for environment in record.environments:
        words += ["--environment", environment]
    if spec.reload:
        words.append("--reload")
    if spec.volume:
        words += ["--image", record.profile.image, "--root", spec.root]
    return words


def _host_config(spec: HostSpec, facts: EngineFacts) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "AutoRemove": facts.removes,
        "Init": True,
        "NetworkMode": "none",
        "IpcMode": "private",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": _security(facts),
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "Tmpfs": {
            "/tmp": f"rw,nosuid,nodev,exec,mode=1777,size={_TMP_BYTES}",  # noqa: S108 - inside
            "/run": f"rw,nosuid,nodev,noexec,mode=755,size={_RUN_BYTES}",
            **dict.fromkeys(spec.sources.open, f"rw,nosuid,nodev,noexec,mode=755,size={_OPENED_BYTES}"),
        },
        "Mounts": _mounts(spec),
        "Ulimits": _ULIMITS,
        "LogConfig": _LOG,
        "OomScoreAdj": _OOM_SCORE,
        **_bounds(spec, facts),
    }
    if spec.runtime:
        settings["Runtime"] = spec.runtime
    return settings


def _bounds(spec: HostSpec, facts: EngineFacts) -> dict[str, int]:
    profile, slots = spec.record.profile, spec.record.slots
    memory = HOST_MEMORY_BYTES + slots * (profile.memory_bytes + profile.disk_bytes)
    memory = min(memory, facts.memory_bytes or memory)
    cpus = min(HOST_CPUS + slots * profile.cpus, float(facts.cpus))
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": HOST_PIDS + slots * (profile.pids + SLOT_PIDS),
        "NanoCpus": int(cpus * 1e9),
    }


def _security(facts: EngineFacts) -> list[str]:
    options = ["no-new-privileges", f"seccomp={seccomp()}"]
    if "apparmor" in facts.security:
        options.append("apparmor=unconfined")  # Docker's own profile forbids every mount, those of bubblewrap too
    return options


def _mounts(spec: HostSpec) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"Type": "bind", "Source": spec.record.folder, "Target": SOCKETS}]
    if spec.volume:
        found.append(
            {
                "Type": "volume",
                "Source": spec.volume,
                "Target": IMAGE,
                "ReadOnly": True,
                "VolumeOptions": {"NoCopy": True},
            }
        )
    for mount in (*spec.mounts, *spec.sources.mounts):
        source, _, target = mount.partition(":")
        found.append({"Type": "bind", "Source": source, "Target": target or source, "ReadOnly": True})
    return found


@cache
def seccomp() -> str:
    """Our profile: what ordinary programs use and what bubblewrap needs; see the comments in it."""
    text = resources.files("sandboxes.docker").joinpath("seccomp.json").read_text()
    return json.dumps(json.loads(text), separators=(",", ":"))
