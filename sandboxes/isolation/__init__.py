"""What stands between code that a model wrote and the machine. Fails closed."""
