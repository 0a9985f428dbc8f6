"""``python -m sandboxes.host``."""

import sys

import typer

from envfarm.core.errors import FarmError
from sandboxes.host.command import host

if __name__ == "__main__":
    try:
        typer.run(host)
    except FarmError as error:
        sys.exit(f"error: {error}")
