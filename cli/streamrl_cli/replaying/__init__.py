"""A run told again: its steps trained once more from its samples, and set beside those of another run."""
