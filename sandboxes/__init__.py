"""Where episodes run: hosts, backends, isolation, tools inside, built-in environments."""
