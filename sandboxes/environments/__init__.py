"""Environments that come with the farm."""
