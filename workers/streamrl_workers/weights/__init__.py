"""Weights as raw bytes: published by the trainer, pulled in hash-checked chunks by generators."""
