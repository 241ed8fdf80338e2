"""When a process counts as frozen. The local runner, whoever else starts processes, and the probes on Kubernetes go by this.

A frozen process (stopped, stuck in the kernel, its event loop blocked) ends nothing and says nothing: connections stay open. What tells is the
heartbeat file that each process touches (`ENV_HEARTBEAT_FILE`): no other process or pod can keep it from that, and none can do it instead.
"""

import math
from collections.abc import Mapping

from streamrl.errors import UserError
from streamrl.keys import ENV_LIVENESS_SECONDS

INTERVAL_S = 1.0
"""Between two heartbeats."""
LIVENESS_S = 90.0
"""Without a heartbeat for so long a process is killed and started again. Whatever keeps the interpreter longer than that is not known: torch computes,
loads and saves without the interpreter's lock."""
SCHEDULER_LOST_S = 120.0
"""Generators and trainer end after so long without a scheduler. More than a frozen one lives, so they outlive its restart."""
_LEAST_S = 3 * INTERVAL_S


def liveness_s(environ: Mapping[str, str]) -> float:
    """The bound that is set, or the default, in seconds.

    Raises `UserError`: it is no number, or too small to tell a frozen process from a busy one.
    """
    text = environ.get(ENV_LIVENESS_SECONDS, "")
    try:
        bound_s = float(text) if text else LIVENESS_S
    except ValueError:
        bound_s = math.nan
    if not _LEAST_S <= bound_s < math.inf:
        raise UserError(field=ENV_LIVENESS_SECONDS, rule=f"must be a number of at least {_LEAST_S:g}", got=text)
    return bound_s


def word_s(bound_s: float) -> float:
    """Silence, in seconds, after which a person is told: a third of the bound."""
    return bound_s / 3
