"""Which GPUs a run's computing processes see. Pure but for `visible_gpus`.

Rank r of the trainer takes the r-th GPU that it sees (torchrun's `LOCAL_RANK`), so all ranks see the first ones. A
generator uses one GPU: the next of the rest, in turn; with mode Colocated, and where none is left, of all of them.
Without GPUs nobody is told anything.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"
"""As CUDA reads it: numbers or names of devices, by commas."""
_DEVICES = Path("/dev")


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA names them; found without loading CUDA."""
    given = os.environ.get(ENV_VISIBLE)
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() and part.strip() != "-1")
    found = [path.name.removeprefix("nvidia") for path in _DEVICES.glob("nvidia[0-9]*")]
    return tuple(sorted(found, key=int))


def rank_gpus(gpus: Sequence[str], *, ranks: int) -> Mapping[str, str]:
    """Environment of every rank of the trainer."""
    return {ENV_VISIBLE: ",".join(gpus[:ranks])} if gpus else {}


def generator_gpu(gpus: Sequence[str], *, ranks: int, number: int, colocated: bool) -> Mapping[str, str]:
    """Environment of generator `number`, counted over all pools."""
    if not gpus:
        return {}
    free = gpus if colocated else gpus[ranks:] or gpus
    return {ENV_VISIBLE: free[number % len(free)]}
