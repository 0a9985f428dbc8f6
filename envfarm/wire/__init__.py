"""What crosses a process boundary: generated protobuf, conversions, channels, auth, clients, the multiplexed stream."""

import os

# gRPC's fork handlers are for processes that go on using channels in a forked child. Ours only ever fork to exec, and
# the handlers would print a warning each time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
