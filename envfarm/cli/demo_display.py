"""What ``envfarm demo`` shows while it runs: a line per series with its curve, and the state of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envfarm.core.run import MetricPoint, Run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
#: What is sampled in one report is a handful of episodes: these show the mean of so many reports, a second apart.
_SMOOTHED = 8
_SMOOTH = ("rollout/success", "rollout/steps_per_s", "rollout/tokens_per_s", "reward/")
#: series name → (label with unit, format) in the order shown
ROWS: dict[str, tuple[str, str]] = {
    "evaluate/validation": ("success, validation tasks", "percent"),
    "rollout/success": ("success, training tasks", "percent"),
    "reward/completion": ("reward: completion", "number"),
    "reward/progress": ("reward: progress", "number"),
    "reward/format": ("reward: format", "number"),
    "reward/tool": ("reward: tool", "number"),
    "reward/efficiency": ("reward: efficiency", "number"),
    "rollout/steps_per_s": ("steps/s", "count"),
    "rollout/tokens_per_s": ("tokens/s", "count"),
    "rollout/open_episodes": ("open episodes", "count"),
    "train/staleness_max": ("staleness (versions)", "count"),
    "train/kl": ("KL to the sampler (nats)", "small"),
    "train/entropy": ("entropy (nats per token)", "small"),
    "train/mismatch": ("sampler/trainer |Δ log p|", "small"),
}


class Curves:
    """Latest points of every series of a run. Pure state: points in, picture out."""

    def __init__(self) -> None:
        self._series: dict[str, list[float]] = defaultdict(list)
        self.run: Run | None = None

    def add(self, run: Run | None, points: Iterable[MetricPoint]) -> None:
        """Take in the run's state and new points."""
        self.run = run or self.run
        for point in points:
            self._series[point.name].append(point.value)

    def last(self, name: str) -> float | None:
        """Last value of a series, ``None`` when there is none."""
        values = self._series.get(name)
        return values[-1] if values else None

    def first(self, name: str) -> float | None:
        """First value of a series, ``None`` when there is none."""
        values = self._series.get(name)
        return values[0] if values else None

    def peak(self, name: str) -> float | None:
        """Largest value of a series, ``None`` when there is none."""
        values = self._series.get(name)
        return max(values) if values else None

    def mean(self, name: str) -> float | None:
        """Mean of a series, ``None`` when there is none."""
        values = self._series.get(name)
        return sum(values) / len(values) if values else None

    def values(self, name: str) -> list[float]:
        """All values of a series, oldest first."""
        return self._series.get(name, [])

    def shown(self, name: str) -> list[float]:
        """Values of a series as they are drawn, oldest first: noisy ones as trailing means."""
        values = self.values(name)
        if not name.startswith(_SMOOTH):
            return values
        windows = (values[max(0, end - _SMOOTHED) : end] for end in range(1, len(values) + 1))
        return [sum(window) / len(window) for window in windows]

    def names(self) -> list[str]:
        """Names of all series, sorted."""
        return sorted(self._series)


def line(curves: Curves, *, stage: str, seconds: float) -> str:
    """The state of the run in one line, for where there is no terminal."""
    version = curves.run.policy_version if curves.run else 0
    shown = [f"{seconds:5.0f} s  {stage}  version {version}"]
    for name in ("evaluate/validation", "rollout/success", "rollout/steps_per_s", "rollout/tokens_per_s", "train/kl"):
        values = curves.shown(name)
        if values:
            label, kind = ROWS[name]
            shown.append(f"{label} {format_value(values[-1], kind)}")
    return "  ".join(shown)


def render(curves: Curves, *, stage: str, seconds: float) -> RenderableType:
    """The whole display: a headline, then one row per series that has values."""
    version = curves.run.policy_version if curves.run else 0
    episodes = curves.last("rollout/episodes") or 0
    headline = Text.assemble(
        ("envfarm demo  ", "bold"),
        (f"{stage}", "cyan"),
        f"   policy version {version}   {episodes:.0f} training episodes   {seconds:.0f} s",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", min_width=28)
    table.add_column(justify="right", min_width=9)
    table.add_column()
    for name in _shown(curves):
        label, kind = ROWS.get(name, (name.replace("reward/", "reward: "), "number"))
        values = curves.shown(name)
        bounds = (0.0, 1.0) if kind == "percent" else None
        table.add_row(label, format_value(values[-1], kind) if values else "-", spark(values, bounds))
    return Group(headline, table)


def _shown(curves: Curves) -> list[str]:
    extra = [n for n in curves.names() if n.startswith("reward/") and n not in ROWS]
    return [*ROWS, *extra]


def spark(values: list[float], bounds: tuple[float, float] | None = None) -> Text:
    """The last values as a curve of block characters, scaled to ``bounds`` or, without, to their own range."""
    tail = values[-_WIDTH:]
    if not tail:
        return Text("")
    low, high = bounds or (min(tail), max(tail))
    span = (high - low) or 1.0
    bars = "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in tail)
    return Text(bars, style="green")


def format_value(value: float, kind: str) -> str:
    """``percent``, ``count``, ``small`` or ``number``, as a person reads it."""
    if kind == "percent":
        return f"{value * 100:.0f} %"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "small":
        return f"{value:.2g}"
    return f"{value:+z.2f}"
