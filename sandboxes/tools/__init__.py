"""Toolsets that several environments share."""
