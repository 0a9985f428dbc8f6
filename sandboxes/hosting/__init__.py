"""What backends that start host servers of their own have in common: sockets, readiness, contact, news."""
