"""The SDK's way to an engine's unix socket, but for one thing: a socket that finds nobody there is closed.

The SDK leaves that to the garbage collector, at every try while the engine is away.
"""

from __future__ import annotations

import socket
from typing import Any

from docker import APIClient
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


def mend(client: APIClient, path: str) -> None:
    """Have ``client``, of the engine that listens at ``path``, close the sockets that it cannot connect."""
    client.mount("http+docker://", _Adapter(f"http+unix://{path}", client.timeout))


class _Connection(UnixHTTPConnection):  # type: ignore[misc]
    def connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self.timeout)
            made.connect(self.unix_socket)
        except BaseException:
            made.close()
            raise
        self.sock = made


class _Pool(UnixHTTPConnectionPool):  # type: ignore[misc]
    def _new_conn(self) -> _Connection:
        return _Connection(self.base_url, self.socket_path, self.timeout)


class _Adapter(UnixHTTPAdapter):  # type: ignore[misc]
    def get_connection(self, url: str, proxies: Any = None) -> _Pool:  # noqa: ARG002 - its name is the SDK's
        with self.pools.lock:
            pool: _Pool | None = self.pools.get(url)
            if pool is None:
                pool = self.pools[url] = _Pool(url, self.socket_path, self.timeout, maxsize=self.max_pool_size)
            return pool
