"""The ranks of one trainer: process group, scattering work from rank 0, adding up what they measured.

Work is scattered over a gloo group of its own, also where the model's collectives run on NCCL.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")
TIMEOUT = datetime.timedelta(minutes=10)  # longest that one rank may be ahead of another


class Ranks:
    """This process's place among ``world`` ranks. With one rank on a CPU there is no process group at all."""

    def __init__(self, rank: int, world: int, *, device: str, store: Store | None = None) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._store = store
        self._control: dist.ProcessGroup | None = None

    @property
    def grouped(self) -> bool:
        """Whether the model is sharded over a process group."""
        return self.world > 1 or self.device != "cpu"

    def __enter__(self) -> Ranks:
        if self.grouped:
            if self.device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
            backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
            store = self._store if self._store is not None else _environment_store(self.rank, self.world)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=TIMEOUT)
            self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.grouped and kind is None:  # after an error the others may be gone: destroying would wait for them
            dist.destroy_process_group()

    def scatter(self, items: list[T] | None) -> T:
        """Rank 0 gives one item per rank, every rank gets its own. Items must pickle."""
        if self.world == 1:
            assert items is not None
            return items[0]
        received: list[T | None] = [None]
        dist.scatter_object_list(received, items if self.rank == 0 else None, src=0, group=self._control)
        item = received[0]
        assert item is not None
        return item

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sums over the ranks, the same on each."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: list[float]) -> list[float]:
        """Elementwise maxima over the ranks, the same on each."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self._control)
        return [float(v) for v in tensor]


def _environment_store(rank: int, world: int) -> Store:
    """The rendezvous that torchrun announces in the environment, or one in memory for a single rank."""
    if world == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(host, port, world, is_master=serves, timeout=TIMEOUT)
