"""The tables of the StreamRL paper (arXiv 2504.15930), by simulation with the scheduler's own decisions.

```
facts.py  what the paper says ─┐
rule.py   hardware, lengths, slots, calibration ─ profile.py (makespans by GPUs) ─ runs.py (whole runs) ─┬─ holdout.py
                                                                                                        ├─ fit.py
                                          resources.py (Fig. 10, 11)  ──────────────────────────────────┴─ tables.py, svg.py
```
Owns the model of the paper's hardware and how it is calibrated. Does not own any decision: dispatch, staleness, hand-over, Algorithm 1
and scaling are imported. The rule is in `rule.py`; the hold-out never changes it.
"""
