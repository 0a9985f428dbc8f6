"""Domain structs to protobuf and back, a function per type and direction: ``x_to_pb``, ``fill_x``, ``x_from_pb``.

Enums map by name; a value this version does not know becomes the type's most careful one, never an exception.
"""
