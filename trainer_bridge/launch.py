"""Starts the ranks of a trainer: in this process, under torchrun, or as processes that this one watches over."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import time
import traceback
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

import torch
from torch._C._distributed_c10d import Store, TCPStore

from envfarm.core.errors import FarmError
from trainer_bridge.learner import Learner
from trainer_bridge.orders import Learners, follow
from trainer_bridge.ranks import TIMEOUT, Ranks
from trainer_bridge.settings import TrainSettings
from trainer_bridge.trainer import Trainer

GRACE_SECONDS = 5.0  # for the other ranks to say their own cause once one has ended
_PR_SET_PDEATHSIG = 1


class RankFailed(FarmError):
    """A rank ended although training had not; the others were ended too."""

    code = "rank_failed"


def launch(settings: TrainSettings, ranks: int) -> None:
    """Train with ``ranks`` processes; under torchrun with as many as it started. Returns when training is over."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        run_rank(settings, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    elif ranks == 1:
        run_rank(settings, 0, 1)
    else:
        _Spawned(settings, ranks).run()


def run_rank(settings: TrainSettings, rank: int, world: int, store: Store | None = None) -> None:
    """Everything that one rank does. Only the first talks to gateway and engines."""
    with Ranks(rank, world, device=settings.compute.device, store=store) as ranks:
        if rank != 0:
            for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides, after its checkpoint
                signal.signal(number, signal.SIG_IGN)
            follow(Learner(settings, ranks), ranks)
            return
        learners = Learners(Learner(settings, ranks), ranks)
        asyncio.run(_drive(settings, learners))


async def _drive(settings: TrainSettings, learners: Learners) -> None:
    from envfarm.inference.pool import EnginePool
    from envfarm.trajectories.codec import decode
    from envfarm.wire.channel import connect, reach
    from envfarm.wire.log_client import LogClient
    from envfarm.wire.run_client import RunClient

    async with AsyncExitStack() as stack:
        channel = connect(settings.gateway, token=settings.token)
        stack.push_async_callback(channel.close)
        await reach(channel, settings.gateway)
        engine = EnginePool(list(settings.engines)) if settings.engines else None
        if engine is not None:
            stack.push_async_callback(engine.close)
        groups = await stack.enter_async_context(LogClient(channel))
        trainer = Trainer(
            settings, learners=learners, groups=groups, runs=RunClient(channel), engine=engine, decode=decode
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, trainer.stop, f"signal {number.name}")
        await trainer.run()


class _Spawned:
    """Ranks as child processes. When one fails, all end, and the cause is that of the one that failed first."""

    def __init__(self, settings: TrainSettings, world: int) -> None:
        self._settings = settings
        self._world = world
        self._processes: list[SpawnProcess] = []
        self._causes: list[Connection] = []
        self._signals = 0

    def run(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._forward) for number in handled}
        try:
            self._start(store.port)
            self._watch()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_process,
                args=(self._settings, rank, self._world, port, sender, os.getpid()),
                name=f"rank {rank}",
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._causes.append(receiver)

    def _watch(self) -> None:
        """Until all ranks have ended well; raises with the cause as soon as one has not."""
        while alive := [p.sentinel for p in self._processes if p.exitcode is None]:
            wait(alive, timeout=1.0)
            if any(p.exitcode for p in self._processes):
                break
        if any(p.exitcode for p in self._processes):
            self._settle()
            raise RankFailed(self._cause())

    def _settle(self) -> None:
        """Give the other ranks a moment to end by themselves: what they say may be the cause."""
        end = time.monotonic() + GRACE_SECONDS
        while (alive := [p.sentinel for p in self._processes if p.exitcode is None]) and time.monotonic() < end:
            wait(alive, timeout=max(0.0, end - time.monotonic()))

    def _cause(self) -> str:
        said = {rank: cause for rank, c in enumerate(self._causes) if (cause := _received(c)) is not None}
        lines = []
        for rank, process in enumerate(self._processes):
            if (process.exitcode or 0) < 0:
                lines.append(f"rank {rank} was killed by {signal.Signals(-(process.exitcode or 0)).name}")
        lines += [f"rank {rank}: {text}" for rank, (own, text) in sorted(said.items(), key=lambda item: not item[1][0])]
        return "; ".join(lines) or "a rank ended without saying why"

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """First signal: rank 0 saves a checkpoint and ends all. Second: all end now."""
        self._signals += 1
        for process in self._processes[:1] if self._signals == 1 else self._processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number if self._signals == 1 else signal.SIGKILL)

    def _kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def _rank_process(settings: TrainSettings, rank: int, world: int, port: int, cause: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if rank else signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format=LOG_FORMAT)
    torch.set_num_threads(settings.compute.threads)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        run_rank(settings, rank, world, store)
    except FarmError as error:
        cause.send((True, str(error)))
        os._exit(1)
    except BaseException as error:  # whatever ended this rank, its parent must be told the cause
        traceback.print_exc()
        cause.send((not _broken_peer(error), f"{type(error).__name__}: {error}"))
        os._exit(1)  # without waiting for collectives that nobody will answer


def _received(connection: Connection) -> tuple[bool, str] | None:
    """What a rank said about its end: (whether it is its own fault, text)."""
    try:
        return connection.recv() if connection.poll() else None
    except EOFError:  # it ended without a word
        return None


def _broken_peer(error: BaseException) -> bool:
    """Whether this rank failed because another had: gloo reports a closed connection."""
    return isinstance(error, RuntimeError) and ("closed by peer" in str(error) or "onnection reset" in str(error))


LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
