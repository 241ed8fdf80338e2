"""How many devices each stage of a job should have. Pure: profiled times in, sizes, times and costs out.

    latency by batch size, train seconds by tokens ─ stage_times.py ─▶ StageCurve ─ choice.py (Alg. 1, costs) ─▶ Allocation and why

Owns Alg. 1 of StreamRL (arXiv 2504.15930, section 4.1) for one datacenter and for two, and how a stage's time follows
the number of its devices. Does not own measuring (the command line's `profile`), nor changes while a job runs
(`autoscaler`, which measures for itself). Invariants: no clock, no randomness; a stage with more devices is never slower.
"""
