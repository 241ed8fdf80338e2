"""The torch engine's state as files and as published bytes.

Owns: the torch.distributed.checkpoint layout (model, optimiser, random state), the snapshot of the weights. Does not
own: when, where, atomicity (`checkpoint.py`).
"""

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_files
from torch.distributed.checkpoint.state_dict_saver import save as write_files

from streamrl.errors import UserError
from streamrl_workers.weights.hashing import TensorBytes


def save(directory: Path, *, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write the state into `directory`. Raises OSError where the disk does not take it."""
    try:
        with _one_process():
            write_files(_state(model, optimiser), checkpoint_id=directory, no_dist=True)
    except CheckpointException as error:  # no `Exception`: nobody above would catch it
        cause = next(iter(error.failures.values()))[0]
        raise cause if isinstance(cause, OSError) else OSError(errno.EIO, str(cause)) from error


def load(directory: Path, *, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Read it back, bit for bit."""
    state = _state(model, optimiser)
    try:
        with _one_process():
            read_files(state, checkpoint_id=directory, no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, FileNotFoundError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            field=str(directory), rule=f"does not fit this model: {reason}", fix="resume with the job that wrote it"
        ) from error
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        optimiser.state[parameter] = state["optimiser"][name]
    torch.set_rng_state(state["random"])


def tensors(model: torch.nn.Module) -> dict[str, TensorBytes]:
    """A copy of every tensor of the model by name; of names that share one storage, the first."""
    seen: set[tuple[int, int]] = set()
    copies: dict[str, TensorBytes] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.nbytes)
        if tensor.nbytes and place in seen:
            continue
        seen.add(place)
        copies[name] = _bytes_of(tensor)
    return copies


@contextmanager
def _one_process() -> Iterator[None]:
    """That there is no process group is what we want, and no news to the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _bytes_of(tensor: torch.Tensor) -> TensorBytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(
        str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memoryview(flat.numpy().tobytes())
    )


def _state(model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything by name: tensors that are saved, or that are loaded into."""
    moments = {name: _moments(optimiser, parameter) for name, parameter in model.named_parameters()}
    return {"model": model.state_dict(), "optimiser": moments, "random": torch.get_rng_state()}


def _moments(optimiser: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state of one parameter; zeros before its first step."""
    known: dict[str, torch.Tensor] = optimiser.state.get(parameter) or {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }
    return known
