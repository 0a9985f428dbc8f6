"""The ceiling: a bare gRPC echo over one stream with coalesced messages, in a process of its own.

It takes the farm's own messages and does nothing with them: no handle, no parsing, no tool, no reward, no second hop.
``python -m benchmarks.echo`` serves on a free port of the loopback and prints its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from envfarm.wire.v1 import episode_pb2 as pb
from envfarm.wire.v1 import episode_pb2_grpc


class Echo(episode_pb2_grpc.EpisodeServiceServicer):
    """Answers every command of a batch in one batch."""

    async def Interact(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, requests: AsyncIterator[pb.InteractRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.InteractResponse]:
        """Echo."""
        async for batch in requests:
            yield pb.InteractResponse(
                replies=[
                    pb.Reply(id=c.id, step=pb.StepResponse(index=c.step.index, reward=0.5)) for c in batch.commands
                ]
            )


async def serve() -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    episode_pb2_grpc.add_EpisodeServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


class EchoClient:
    """Whatever waits goes into the next message; one future per command."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = episode_pb2_grpc.EpisodeServiceStub(channel).Interact()
        self._queue: list[pb.Command] = []
        self._ready = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}
        self._next = 0

    async def write(self) -> None:
        """Send batches for ever."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            batch, self._queue = self._queue, []
            await self._call.write(pb.InteractRequest(commands=batch))

    async def read(self) -> None:
        """Resolve futures for ever."""
        async for batch in self._call:
            for reply in batch.replies:
                self._waiting.pop(reply.id).set_result(reply)

    async def step(self, index: int, text: str) -> pb.Reply:
        """One echo."""
        self._next += 1
        future: asyncio.Future[pb.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        action = pb.TextAction(format="hermes", text=text)
        self._queue.append(pb.Command(id=self._next, step=pb.StepRequest(handle="-" * 160, index=index, text=action)))
        self._ready.set()
        return await future


if __name__ == "__main__":
    asyncio.run(serve())
