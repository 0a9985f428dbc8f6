"""Containers that are over: found by their labels, told apart from those that somebody still looks after."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import APIError, NotFound

from sandboxes.docker.folders import held
from sandboxes.docker.labels import FILLER_KIND, HOST_KIND, KIND, OWNER, HostRecord, record_of

log = logging.getLogger(__name__)
ABANDONED_SECONDS = 3600.0  # what somebody made and did not start for so long is nobody's any more
Found = tuple[str, HostRecord]


def sweep(client: APIClient, owner: str) -> tuple[list[Found], list[Found]]:
    """Remove what does not run and nobody waits for. Blocking.

    Returns the hosts of ``owner`` that run, and those of others whose gateway is gone: what does not answer among the
    latter is to be removed as well, while what answers ends itself.
    """
    own: list[Found] = []
    orphans: list[Found] = []
    for container in _containers(client, HOST_KIND):
        labels, running = container.get("Labels") or {}, container.get("State") == "running"
        mine, record = labels.get(OWNER) == owner, record_of(labels)
        if (mine and (not running or record is None)) or (not running and _abandoned(container)):
            discard(client, container["Id"])
        elif running and record is not None and (mine or held(Path(record.state)) is False):
            (own if mine else orphans).append((str(container["Id"]), record))
    for container in _containers(client, FILLER_KIND):
        if (container.get("Labels") or {}).get(OWNER) == owner or _abandoned(container):
            discard(client, container["Id"])
    return own, orphans


def discard(client: APIClient, container: str) -> None:
    """Remove a container at once; one that is not there, or on its way out, is no error. Blocking."""
    try:
        client.remove_container(container, v=True, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:
            raise
        with contextlib.suppress(NotFound):
            client.wait(container, timeout=10, condition="removed")


def _containers(client: APIClient, kind: str) -> list[dict[str, Any]]:
    return list(client.containers(all=True, filters={"label": f"{KIND}={kind}"}))


def _abandoned(container: dict[str, Any]) -> bool:
    return time.time() - float(container.get("Created") or 0.0) > ABANDONED_SECONDS
