"""``python -m sandboxes.host``."""

import typer

from sandboxes.host.command import host

if __name__ == "__main__":
    typer.run(host)
