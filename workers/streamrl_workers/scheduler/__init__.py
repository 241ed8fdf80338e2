"""The scheduler: owns the life of every group. Never imports torch."""
