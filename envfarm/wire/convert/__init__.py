"""Domain structs to protobuf and back, one pair of functions per type: ``x_to_pb`` and ``x_from_pb``.

Enums map by name; a value this version does not know becomes the type's most careful one, never an exception.
"""
