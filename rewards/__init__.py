"""Reward parts, pure functions of one step, and an audit of what they did over many episodes."""
