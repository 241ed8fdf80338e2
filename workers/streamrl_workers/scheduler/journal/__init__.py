"""The durable truth about every group: the file, what records do to it, recovery, check and repair."""
