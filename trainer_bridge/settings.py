"""Everything that one training run is told, as it travels from the command line to every rank."""

from __future__ import annotations

from pathlib import Path

import msgspec

from envfarm.core.errors import ConfigError
from envfarm.core.run import RunSettings
from envfarm.core.trajectory import Purpose
from trainer_bridge.advantages import Advantage


class OptimiserSettings(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW with a linear warm-up over ``warmup`` versions, gradients clipped to ``clip_norm``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 3
    clip_norm: float = 1.0


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ratio bounds ``1 - clip`` to ``1 + clip_high``; ``tis`` caps the sampler correction, ``None`` turns it off."""

    clip: float = 0.2
    clip_high: float = 0.28
    tis: float | None = 2.0


class AdvantageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which estimator, and its parameters; see ``trainer_bridge.advantages``."""

    kind: Advantage = "turn"
    gamma: float = 1.0
    lam: float = 1.0
    std: bool = True


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes a batch.

    ``groups_per_version`` and ``staleness`` (most versions between sampling and training) are the run's own where
    they are ``None``; see :meth:`for_run`. ``linger_s``: a batch may be
    short when no further group comes for so long (``None``: wait until it is whole). ``singles``: groups of one
    trainable member are kept, for a baseline over the whole batch. ``fill``: the least share of a window's groups that
    must have something to teach before a version is made; fewer wait for the next window.
    """

    purpose: Purpose = "train"
    groups_per_version: int | None = None
    staleness: int | None = None
    drop_zero_variance: bool = True
    singles: bool = False
    shuffle_rewards: bool = False
    linger_s: float | None = None
    fill: float = 0.5
    prefetch: int = 64

    def for_run(self, run: RunSettings) -> DataSettings:
        """The same with the run's values filled in. Stored data of another purpose has no staleness bound by itself.

        Raises ``ConfigError`` for more groups per version than the run hands out before one of them is trained.
        """
        ahead = run.groups_per_version * (1 + run.staleness)
        if self.purpose == "train" and (self.groups_per_version or 0) > ahead:
            raise ConfigError(
                f"--groups {self.groups_per_version}: the run hands out at most {ahead} groups ahead of its trainer "
                "(groups_per_version x (1 + staleness)); give fewer, or create a run with a larger window"
            )
        bound = run.staleness if self.purpose == "train" else None
        return msgspec.structs.replace(
            self,
            groups_per_version=self.groups_per_version or run.groups_per_version,
            staleness=bound if self.staleness is None else self.staleness,
        )


class ComputeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is cut. ``micro_tokens``: padded tokens per forward; ``micro_logits``: trained tokens x vocabulary."""

    minibatches: int = 2
    micro_tokens: int = 2048
    micro_logits: int = 64_000_000
    threads: int = 1
    device: str = "cpu"


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. ``steps`` counts versions made since the start, those before a resume included."""

    run_id: str
    policy: Path
    out: Path
    gateway: str
    token: str | None = None
    engines: tuple[str, ...] = ()
    steps: int | None = None
    seed: int = 0
    resume: bool = False
    checkpoint_s: float = 1800.0
    keep: int = 3
    address_file: Path | None = None
    optimiser: OptimiserSettings = OptimiserSettings()
    loss: LossSettings = LossSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    data: DataSettings = DataSettings()
    compute: ComputeSettings = ComputeSettings()
