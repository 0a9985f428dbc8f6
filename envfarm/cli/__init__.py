"""The command line: what people type, and what they see while it runs."""

import os

# gRPC's fork handlers serve processes that go on using channels in a forked child. Ours fork only to exec, and the
# handlers would print a warning each time. Read when grpc is first imported, hence here.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
