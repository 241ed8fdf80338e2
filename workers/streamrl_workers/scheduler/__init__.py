"""The scheduler's process: owns the life of every group, and decides who generates what, when, and what is trained."""
