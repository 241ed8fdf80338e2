"""What a supervised job makes of a row: how much it counts, and its answer as a sample."""
