"""The processes of a slot: run to their end or spoken to for as long as an episode lasts, found, counted and killed."""
