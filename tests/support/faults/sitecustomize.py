"""With this directory on PYTHONPATH, the scheduler's process raises where STREAMRL_TEST_FAULT says. No other process is touched.

    {"target": "streamrl_workers.scheduler.core:Core.step_done", "call": 3, "after": true, "told": FILE}

`call`: number of the call that raises; `after`: behind what it does, else before. At the end of the process FILE tells how
often it was called; FILE.reached is there from its first call on.
"""

import atexit
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

SCHEDULER = "streamrl_workers.scheduler"
VARIABLE = "STREAMRL_TEST_FAULT"


class InjectedError(RuntimeError):
    """The exception of the campaign."""


def inject(target: str, *, call: int, after: bool, told: str) -> None:
    """Wrap a method."""
    module, _, path = target.partition(":")
    owner, _, name = path.partition(".")
    kind = getattr(importlib.import_module(module), owner)
    method, calls = getattr(kind, name), [0]

    @functools.wraps(method)
    def wrapped(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            Path(f"{told}.reached").touch()
        if calls[0] == call and not after:
            raise InjectedError(f"at call {call} of {path}")
        value = method(*args, **more)
        if calls[0] == call:
            raise InjectedError(f"behind call {call} of {path}")
        return value

    setattr(kind, name, wrapped)
    atexit.register(lambda: Path(told).write_text(str(calls[0])))


if VARIABLE in os.environ and SCHEDULER in sys.orig_argv:
    inject(**json.loads(os.environ[VARIABLE]))
