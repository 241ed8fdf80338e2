"""Continuous batching over a transformers causal LM with the standard KV cache."""
