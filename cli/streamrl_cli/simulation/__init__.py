"""The simulator: the scheduler's own decisions in virtual time, over modelled engines, links and trainers.

```
                     ┌────────────── world.py: until all has happened ─────────────────────┐
 scenario ─▶ shell.py: Core (the scheduler's own, pure) ◀─ progress, loads, heartbeats ─ generator.py ─ engine.py
                │  effects carried out at once, or after     ◀─ steps, versions, credit ── trainer.py
                │  the delays of journal and rewards          ── replicas.py ◀─ the operator's autoscaler (pure)
                ▼
             results.py (what is noted, numbers, trace) ─▶ JSON, output.py (lines, page)
```
What decides is imported from the scheduler and the operator; what only takes time is modelled here. One thread, no
clock but the virtual one, no randomness but the scenario's seed: the same scenario gives the same result.
"""
