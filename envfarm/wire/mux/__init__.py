"""One stream that carries many commands: whatever waits while a write is in flight goes into the next message.

Generic over the pairs ``Interact`` (``Command`` → ``Reply``) and ``Drive`` (``SlotCommand`` → ``SlotReply``): batch
messages have one repeated field, ``commands`` or ``replies``; commands and replies have an ``id`` and a one-of ``kind``
whose member ``error`` is a ``google.rpc.Status``. No timer is involved, so one lone command waits for nothing, and the
cost of gRPC's own work is shared by everything that is ready at the same time.

Both sides run commands through callbacks: a task per command costs more than the rest of its way.
"""

from envfarm.wire.mux.client import Done, MuxClient
from envfarm.wire.mux.server import serve

__all__ = ["Done", "MuxClient", "serve"]
