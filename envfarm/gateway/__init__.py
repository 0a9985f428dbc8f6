"""The gRPC server between policies and sandboxes: admission, routing, rewards, intake. A restart loses nothing."""
