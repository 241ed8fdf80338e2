"""What a run measures: bubbles, JSONL files, Prometheus text, and the read-only signals port."""
