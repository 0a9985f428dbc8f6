"""``python -m envfarm.wire.health ADDRESS``: status 0 when the server there says that it serves. For probes."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 4.0


def serves(address: str) -> bool:
    """Whether the gRPC server at ``address`` (``unix:/path`` or ``host:port``) answers that it serves."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if serves(sys.argv[1]) else 1)
