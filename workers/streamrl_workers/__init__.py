"""The data plane: scheduler, generators and trainer, and what they stand on."""
