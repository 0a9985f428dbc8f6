"""Programs as they are right. Tasks show them with a fault worked in; what docstrings promise is what is checked."""
