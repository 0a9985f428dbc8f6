"""Where batches come from while time passes: groups as they arrive, pauses, silence, the end of stored data."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import numpy as np

from envfarm.core.errors import ConfigError
from trainer_bridge.former import Batch, BatchFormer
from trainer_bridge.run_watch import POLL_SECONDS, RunWatch
from trainer_bridge.settings import DataSettings
from trainer_bridge.stream import GroupStream

log = logging.getLogger(__name__)
SAY_SECONDS = 10.0  # how often a waiting trainer says what it waits for
OFFLINE_SECONDS = 30.0  # how long stored data may take to arrive before there is none

Meanwhile = Callable[[float], Awaitable[None]]


class Feed:
    """Gives one batch at a time. ``meanwhile(seconds waited)`` is called every few seconds of waiting."""

    def __init__(
        self, stream: GroupStream, former: BatchFormer, data: DataSettings, watch: RunWatch, meanwhile: Meanwhile
    ) -> None:
        self._stream = stream
        self._former = former
        self._data = data
        self._watch = watch
        self._meanwhile = meanwhile
        self._said = 0.0
        self._arrived = 0

    async def next(self, version: int, generator: np.random.Generator) -> Batch | None:
        """The next batch for the trainer at ``version``; ``None`` when there is a reason to stop.

        Raises ``ConfigError`` when stored data was asked for and there is none.
        """
        began = self._said = last_group = time.monotonic()
        while not self._watch.stopping:
            await self._say(time.monotonic() - began, version)
            if self._watch.paused:
                await self._watch.wait_stopping(POLL_SECONDS)
                continue
            if self._former.full:
                return self._former.form(version, generator)
            group = await self._stream.next(POLL_SECONDS)
            if group is not None:
                self._former.add(group)
                self._arrived += 1
                last_group = time.monotonic()
            elif self._data.linger_s is not None:
                silence = time.monotonic() - last_group
                if self._former.waiting and silence >= self._data.linger_s:
                    return self._former.form(version, generator)
                self._check_exhausted(silence)
        return None

    def _check_exhausted(self, silence: float) -> None:
        if silence < OFFLINE_SECONDS:
            return
        if not self._arrived:
            raise ConfigError(
                f"run {self._watch.run.id} has no group of purpose {self._data.purpose!r} in the log that was not "
                "trained on; expected at least one: collect some, or give another --purpose"
            )
        self._watch.stop("the log holds nothing more")

    async def _say(self, waited: float, version: int) -> None:
        now = time.monotonic()
        if now - self._said < SAY_SECONDS:
            return
        self._said = now
        if self._watch.paused:
            log.info("the run is paused (%s): nothing is trained", self._watch.run.cause or "no cause given")
        else:
            log.info(
                "waiting for data since %.0f s: %d of %d groups for version %d",
                waited,
                self._former.waiting,
                self._former.size,
                version + 1,
            )
        await self._meanwhile(waited)
