"""Domain structs, errors, protocols. Imports nothing else of the farm; its only I/O is importing plugins."""
