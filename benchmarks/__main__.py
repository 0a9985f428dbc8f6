"""Run the benchmarks: ``python -m benchmarks [--json FILE] [--bounds] [steps] [opening] [exec] [tools] [log] …``.

Figures are of this machine at this moment; the ratios to the ceilings measured beside them are what can be compared.
With ``--bounds`` a figure above what is promised ends the command with status 1, when it is so in every try.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks import bounds

PARTS = ("steps", "opening", "exec", "tools", "log", "engine")


def main() -> None:
    """Run the parts asked for and print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--bounds", action="store_true", help="fail when a figure is above what is promised")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there is: {', '.join(PARTS)}")
    figures: dict[str, float | str] = {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.processor() or platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("envfarm", "grpcio", "protobuf", "msgspec")},
    }
    broken: list[str] = []
    for part in options.parts or PARTS:
        for _ in range(bounds.TRIES if options.bounds else 1):
            measured = _measured(part)
            exceeded = bounds.exceeded(measured)
            if not exceeded:
                break
        figures.update(measured)
        broken += exceeded
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.bounds and broken:
        sys.exit("\n".join(broken))


def _measured(part: str) -> dict[str, float | str]:
    print(f"{part} ...", flush=True)
    measured: dict[str, float | str] = importlib.import_module(f"benchmarks.{part}").measure()
    for name, value in measured.items():
        print(f"  {name:32} {value:,.2f}" if isinstance(value, float) else f"  {name:32} {value}", flush=True)
    return measured


if __name__ == "__main__":
    main()
