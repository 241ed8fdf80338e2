"""`streamrl profile`: how fast a job's engine decodes and its trainer trains on this machine.

    profile_command.py ─▶ measuring.py ══ probe.py (a process for each stage; the job's real engines) ─▶ timing.py
              │                 ▲ JSON lines
              └─▶ record.py (profile.json) ─▶ `streamrl plan --optimize`

Owns what is measured, for how long, and the file. Does not own the engines, nor what is decided by the numbers
(`streamrl_operator.allocation`). Only `probe.py` imports workers that may load torch.
"""
