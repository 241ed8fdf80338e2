"""Rewards: what a completion earns. `registry` names them; each is one file."""
