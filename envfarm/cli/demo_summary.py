"""The result of a demo, as a dictionary for machines and as a few lines for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envfarm.cli.demo_display import Curves
from envfarm.core.log import LogCounts
from envfarm.rollout.evaluation import Evaluation


def result_of(
    curves: Curves, first: Evaluation, last: Evaluation, counts: LogCounts, *, chosen: int, wall_s: float
) -> dict[str, Any]:
    """What ``--json`` writes. Rates are means over the training phase; absent figures are ``null``."""
    return {
        "success_first": first.success,
        "success_last": last.success,
        "reward_parts_first": first.parts,
        "reward_parts_last": last.parts,
        "episodes": counts.records,
        "steps_per_s": curves.mean("rollout/steps_per_s"),
        "tokens_per_s": curves.mean("rollout/tokens_per_s"),
        "policy_version": curves.run.policy_version if curves.run else None,
        "version_chosen": chosen,
        "trajectories_logged": counts.records,
        "trajectories_trained": _whole(curves.last("train/trajectories")),
        "max_staleness": _whole(curves.peak("train/staleness_max")),
        "infra_failed": counts.infra_failed,
        "wall_s": round(wall_s, 1),
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def summary(result: dict[str, Any], out: Path, *, shuffled: bool) -> RenderableType:
    """What a person reads at the end: what happened, where things lie, what to try next."""
    head = Text.assemble(
        "\nSuccess on held-out tasks, temperature 1: ",
        (_percent(result["success_first"]), "bold"),
        " → ",
        (_percent(result["success_last"]), "bold green"),
        f"   in {result['wall_s']:.0f} s\n",
        f"(measured: version {result['version_chosen']} of {result['policy_version']}, "
        "the best on the validation split)",
    )
    control = (
        "\n(rewards were dealt to the wrong episodes: this is what learning nothing looks like)" if shuffled else ""
    )
    parts = Table("reward per episode", "first", "last", box=None, padding=(0, 3, 0, 0), title_justify="left")
    names = sorted({*result["reward_parts_first"], *result["reward_parts_last"]})
    for name in names:
        parts.add_row(
            name, _number(result["reward_parts_first"].get(name)), _number(result["reward_parts_last"].get(name))
        )
    facts = (
        f"\n{result['trajectories_logged']} trajectories logged, {_count(result['trajectories_trained'])} trained on; "
        f"the others were measurements,\nor of groups whose members did equally well, or too old\n"
        f"oldest weights that a trained token came from: {_count(result['max_staleness'])} versions behind\n"
        f"episodes that failed for the farm's own reasons: {result['infra_failed']}"
    )
    out = _short(out)
    places = (
        f"\nWhere things lie\n"
        f"  trajectories, runs, metrics   {out}/farm.db\n"
        f"  weights                       {out}/trainer/weights\n"
        f"  checkpoints                   {out}/trainer/checkpoints\n"
        f"  logs of every process         {out}/logs\n"
        f"\nTry next\n"
        f"  envfarm demo --shuffle-rewards        the negative control\n"
        f"  envfarm demo --trainer-ranks 2        two FSDP2 ranks\n"
        f"  envfarm env show stockroom            what was trained on\n"
        f"  envfarm env new my_env                an environment of your own"
    )
    return Group(head, Text(control), parts, Text(facts), Text(places))


def _short(path: Path) -> Path:
    """The path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+z.2f}"
