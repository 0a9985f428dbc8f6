"""A shop's stockroom: questions about stock and prices that take two to four tool calls to answer."""

from __future__ import annotations

from sandboxes.environments.stockroom.environment import Stockroom

__all__ = ["Stockroom"]
