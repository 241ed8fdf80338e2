"""Tasks: data sets of prompts, and the pool of processes that makes prompts and scores completions."""
