"""Trajectories at rest: their encoding, the log that stores them durably, digests. Imports core, wire and storage."""
