"""What the trainer gets: scored groups, steps, attempts."""
