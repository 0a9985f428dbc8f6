"""Rollout workers: tokens in, tokens out. Builds token sequences, runs episodes, schedules groups, reports.

May import ``core``, ``wire``, ``inference``, ``tools``, and ``trajectories`` for its codec alone: a worker encodes what
it appends, so that the gateway passes payloads on unopened.
"""
