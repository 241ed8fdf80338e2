"""How many generators a pool should have. Pure."""
