"""Models: built from scratch and warmed up, or loaded by name or path; ready for the trainer and the generators."""
