"""What crosses a process boundary: generated protobuf, conversions, channels, auth, clients, the multiplexed stream."""
