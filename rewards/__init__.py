"""Reward parts, shaping and audits: pure functions of one step."""
