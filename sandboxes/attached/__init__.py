"""Hosts that somebody else starts, found in a shared folder."""
