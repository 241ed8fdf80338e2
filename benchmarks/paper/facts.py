"""What the paper reports (arXiv 2504.15930, sections 2, 4 and 7). Values were read off charts, about 3 % either way.

Units: samples/s, shares of a reference time, GPUs.
"""

LENGTHS = ("5K", "10K", "20K")
MODELS = ("7B", "32B", "72B")
BATCH = 1024
"""Samples of a step (PPO)."""

PTL_MS = {1: 8.3, 2: 8.7, 4: 8.9, 8: 9.0, 16: 9.4, 32: 10.2, 64: 11.7, 128: 15.2, 256: 21.7, 512: 36.9}
"""Per-token latency of 7B on one H800 by batch size, in milliseconds."""

THROUGHPUT = {
    "ColocationRL": {"7B": (13.0, 8.0, 4.8), "32B": (6.0, 2.9, 1.85), "72B": (4.1, 2.4, 1.5)},
    "StreamRL-Sync": {"7B": (16.0, 8.8, 5.07), "32B": (6.7, 3.25, 2.15), "72B": (5.8, 3.0, 1.87)},
    "StreamRL-Async": {"7B": (21.3, 10.6, 5.7), "32B": (7.7, 3.75, 2.45), "72B": (7.3, 3.7, 2.25)},
}
"""Fig. 8: samples/s by `LENGTHS`."""

GENERATION = {
    "7B": {"StreamRL": 0.90, "oracle": 0.815},
    "32B": {"StreamRL": 0.82, "oracle": 0.67},
    "72B": {"StreamRL": 0.785, "oracle": 0.69},
}
"""Fig. 9: generation time at 20K as a share of random dispatch."""

EVEN_SPLIT = {"32B": 0.73, "72B": 0.58}
"""Fig. 10: training time by generation time where each stage has half of the GPUs."""
CHOSEN_SPLIT = {"32B": ((40, 24), (0.80, 0.73)), "72B": ((80, 48), (0.81, 0.83))}
"""Fig. 10: the chosen GPUs (generation, training) and both times by the even split's generation time."""

CROSS = {"H20 + H800": (22.9, 11.9, 5.95), "H800": (18.1, 9.05, 4.85)}
"""Two datacenters, 7B, StreamRL-Async: samples/s by cost. 32 H20 generate and 16 H800 train, against 32 H800 for both. The unit of cost
is the former's: 18.1 · (4 · 2.85) / (4 · 1 + 2 · 2.85) = 21.3, which is Fig. 8's value."""
MACHINE_COST = {"H20": 1.0, "H800": 2.85}
MACHINE_GPUS = 8

ABLATION = {"colocated": 1.00, "+ skewness-aware": 1.08, "+ disaggregated streaming": 1.23, "+ asynchronous": 1.48}
"""72B at 20K: samples/s by the first."""

ELASTIC = ((32, 0), (40, 10), (48, 16), (56, 22))
"""Fig. 11: GPUs of generation, and the iteration from which on."""
RECALL_PERCENT = 87.0
"""Of the longest 20 %, by the ranker (Qwen2.5-7B)."""
