"""``envfarm train``. Nothing heavy is imported until the command runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from envfarm.core.errors import ConfigError


class AdvantageName(enum.StrEnum):
    """Estimators by the name on the command line."""

    TURN = "turn"
    GRPO = "grpo"
    DRGRPO = "drgrpo"
    RLOO = "rloo"
    GAE = "gae"
    BATCH = "batch"


class PurposeName(enum.StrEnum):
    """Which trajectories of the run to train on."""

    TRAIN = "train"
    COLLECT = "collect"
    EVALUATE = "evaluate"


class DeviceName(enum.StrEnum):
    """Where the model is."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


LINGER_SECONDS = 2.0


def train(
    run: Annotated[str, typer.Option(help="Id of the run to train on.")],
    policy: Annotated[Path, typer.Option(help="Hugging Face folder of the starting policy (version 0).")],
    out: Annotated[Path, typer.Option(help="Folder for weights, checkpoints and metrics.")],
    gateway: Annotated[str, typer.Option(help="Address of the gateway, host:port or unix:/path.")],
    token_file: Annotated[Path | None, typer.Option(help="File with the gateway's token.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an engine that gets new weights; repeatable. None: disk only.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="FSDP2 ranks; ignored under torchrun.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Versions to make in all. Default: until stopped.")] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Versions of linear warm-up.")] = 3,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Weight decay of AdamW.")] = 0.0,
    clip_norm: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm.")] = 1.0,
    clip: Annotated[float, typer.Option(min=0.0, max=1.0, help="Policy ratio may fall to 1 - CLIP.")] = 0.2,
    clip_high: Annotated[float, typer.Option(min=0.0, help="Policy ratio may rise to 1 + CLIP_HIGH.")] = 0.28,
    tis: Annotated[float, typer.Option(min=0.0, help="Cap of the sampler correction; 0: no correction.")] = 2.0,
    advantage: Annotated[AdvantageName, typer.Option(help="Advantage estimator.")] = AdvantageName.TURN,
    gamma: Annotated[float, typer.Option(min=0.0, max=1.0, help="Discount per step (turn, gae).")] = 1.0,
    lam: Annotated[float, typer.Option(min=0.0, max=1.0, help="Lambda of gae.")] = 1.0,
    std: Annotated[bool, typer.Option(help="Divide by the group's standard deviation (turn, grpo).")] = True,
    minibatches: Annotated[int, typer.Option(min=1, help="Optimiser steps per version.")] = 2,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups per version. Default: the run's setting.")] = None,
    staleness: Annotated[
        int | None, typer.Option(min=0, help="Most versions between sampling and training. Default: the run's setting.")
    ] = None,
    fill: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Least share of a window's groups that must teach; else they wait.")
    ] = 0.5,
    keep_zero_variance: Annotated[bool, typer.Option(help="Train on groups whose members were equally good.")] = False,
    shuffle_rewards: Annotated[bool, typer.Option(help="Negative control: rewards are dealt out at random.")] = False,
    purpose: Annotated[PurposeName, typer.Option(help="Which trajectories of the run.")] = PurposeName.TRAIN,
    micro_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens per forward pass.")] = 2048,
    micro_logits: Annotated[int, typer.Option(min=1, help="Most logits per forward pass.")] = 64_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random here.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads per rank.")] = 1,
    device: Annotated[DeviceName, typer.Option(help="Device of the model.")] = DeviceName.AUTO,
    checkpoint_minutes: Annotated[float, typer.Option(min=0.0, help="Minutes between checkpoints.")] = 30.0,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints and weight folders to keep.")] = 3,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in OUT, if there is one.")] = False,
    address_file: Annotated[Path | None, typer.Option(help="Gets the word `ready` once the model is loaded.")] = None,
) -> None:
    """Train a policy on a run's trajectories (reference FSDP2 trainer).

    Reads whole groups from the trajectory log, makes one policy version of each window of groups, writes it to
    OUT/weights, loads it into the engines and announces it. With --purpose collect it trains on stored episodes.
    """
    if not policy.is_dir():
        raise ConfigError(f"--policy: no folder {policy}; expected a Hugging Face folder")
    import logging

    from envfarm.wire.auth import read_token

    token = read_token(token_file)

    import torch

    from trainer_bridge.launch import LOG_FORMAT, launch
    from trainer_bridge.settings import (
        AdvantageSettings,
        ComputeSettings,
        DataSettings,
        LossSettings,
        OptimiserSettings,
        TrainSettings,
    )

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    cuda = device is DeviceName.CUDA or (device is DeviceName.AUTO and torch.cuda.is_available())
    offline = purpose is not PurposeName.TRAIN
    settings = TrainSettings(
        run_id=run,
        policy=policy,
        out=out,
        gateway=gateway,
        token=token,
        engines=tuple(engine or ()),
        steps=steps,
        seed=seed,
        resume=resume,
        checkpoint_s=checkpoint_minutes * 60.0,
        keep=keep,
        address_file=address_file,
        optimiser=OptimiserSettings(lr=lr, weight_decay=weight_decay, warmup=warmup, clip_norm=clip_norm),
        loss=LossSettings(clip=clip, clip_high=clip_high, tis=tis or None),
        advantage=AdvantageSettings(kind=advantage.value, gamma=gamma, lam=lam, std=std),
        data=DataSettings(
            purpose=purpose.value,
            groups_per_version=groups,
            staleness=staleness,
            drop_zero_variance=not keep_zero_variance,
            singles=advantage is AdvantageName.BATCH,
            shuffle_rewards=shuffle_rewards,
            linger_s=LINGER_SECONDS if offline else None,
            fill=0.0 if offline else fill,
        ),
        compute=ComputeSettings(
            minibatches=minibatches,
            micro_tokens=micro_tokens,
            micro_logits=micro_logits,
            threads=threads,
            device="cuda" if cuda else "cpu",
        ),
    )
    launch(settings, ranks)
