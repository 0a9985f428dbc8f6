"""Runs: their registry, the tickets that let workers start groups, their metrics. Imports core and storage."""
