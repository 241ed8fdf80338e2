"""Activation checkpointing: a block keeps its inputs and computes its activations again in the backward pass.

transformers' own switch works in training mode only, which would bring dropout; torch's wrapper module changes the names of
tensors. So the blocks' `forward` is replaced: hooks of FSDP stay outside of it, names stay as they are.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from streamrl_workers.trainer.engines.sharding import blocks_of


def recompute_blocks(model: torch.nn.Module) -> None:
    """From now on, in place. No randomness is restored for the second pass: there is no dropout."""
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
