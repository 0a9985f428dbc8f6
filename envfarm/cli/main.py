"""Entry point of ``envfarm``: loads the commands, and turns errors and Ctrl-C, even while it loads, into an answer."""

from __future__ import annotations

import io
import signal
import sys


def main() -> None:
    """Run the command line; errors of the farm become one message on stderr and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows only ASCII gets question marks
    try:
        from envfarm.cli.app import run  # most of the start-up time goes here

        status = run()
    except KeyboardInterrupt:
        status = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending: an impatient Ctrl-C needs no trace of the interpreter
    sys.exit(status)


if __name__ == "__main__":
    main()
