"""Hosts as processes of this machine."""
