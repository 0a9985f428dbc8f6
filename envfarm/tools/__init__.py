"""What stands between a model's text and a Python function: schemas, parsers and validation of tool calls.

Everything here is pure: no network, no clock, no state beyond compiled schemas.
"""
