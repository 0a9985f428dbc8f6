"""Toolsets that several environments share; how to use them is in ``docs/tools.md``."""

from __future__ import annotations

from sandboxes.tools.calculator import Calculator
from sandboxes.tools.faults import Faults
from sandboxes.tools.files import Files
from sandboxes.tools.http import Http
from sandboxes.tools.python import Python
from sandboxes.tools.recording import Request, Response, recording, response
from sandboxes.tools.shell import Shell
from sandboxes.tools.sql import Sql

__all__ = [
    "Calculator",
    "Faults",
    "Files",
    "Http",
    "Python",
    "Request",
    "Response",
    "Shell",
    "Sql",
    "recording",
    "response",
]
