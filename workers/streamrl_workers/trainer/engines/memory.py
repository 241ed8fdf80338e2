"""Whether a rank's part of the training fits its device, said before any weight is read.

Owns: sizes of the model that a job trains, the line in the log, the refusal. Does not own: the estimate (`streamrl.memory`), what is
free (`models/free_memory.py`).

Refused is what can never run: parameters, gradients and optimiser that do not fit alone. The other parts are estimates, and are
warned of. The first part that does not fit beside those before it is named.
"""

import logging
from dataclasses import asdict, replace

import torch

from streamrl.errors import UserError
from streamrl.memory import ModelSizes, RankMemory, published_bytes, rank_memory
from streamrl.spec import RLJobSpec
from streamrl.spec.algorithm import UtteranceCritic
from streamrl.spec.training import Trainer
from streamrl_workers.models.free_memory import free_bytes, total_bytes
from streamrl_workers.models.load import count_parameters, load_structure
from streamrl_workers.models.side_path import train_side_path
from streamrl_workers.trainer.algorithms.algorithm import Algorithm
from streamrl_workers.trainer.engines.expert_parallel import stacks_of
from streamrl_workers.trainer.engines.optimiser import muon_parameters

_GIB = 2**30
_LASTING = ("parameters", "gradients", "optimiser")
_LESS_ACTIVATIONS = (
    "lower spec.trainer.microBatchTokens and spec.task.sampling.maxTokens, or set spec.trainer.activationCheckpointing"
)
_LESS_OF_THE_REST = "raise spec.trainer.processesPerNode or nodes, or set spec.trainer.lora"
_LESS_IN_MAIN_MEMORY = "raise spec.trainer.nodes or set spec.trainer.lora"

log = logging.getLogger(__name__)


def check_memory(
    model_path: str,
    *,
    spec: RLJobSpec,
    algorithm: Algorithm,
    frozen_path: str | None = None,
    device: torch.device,
) -> None:
    """Log the estimate of this rank beside what is free. Raises UserError where the lasting parts alone do not fit.

    frozen_path: of the model that lies beside the policy, untrained.
    """
    trainer = spec.trainer
    sizes = sizes_of(model_path, trainer=trainer)
    need = rank_memory(
        sizes,
        trainer=trainer,
        task=spec.task,
        frozen_parameters=0 if frozen_path is None else count_parameters(frozen_path),
        critic=algorithm.critic is not None,
        target=isinstance(algorithm.critic, UtteranceCritic),
        device_bytes=total_bytes(device),
    )
    free = free_bytes(device, ranks=trainer.processes_per_node)
    main = torch.device("cpu")
    log.info(
        "memory of a rank, about: %s; free on %s: %s; published versions in main memory: %s",
        _listed(need),
        device,
        _gib(free),
        _gib(published_bytes(sizes, trainer=trainer)),
    )
    if not trainer.cpu_offload or device == main:
        complain(need, free=free, device=str(device))
        return
    complain(need.without_states(), free=free, device=str(device))
    states = replace(need, gathered=0, logits=0, publishing=0, activations=0)
    complain(
        states,
        free=free_bytes(main, ranks=trainer.processes_per_node),
        device="main memory",
        less=_LESS_IN_MAIN_MEMORY,
    )


def complain(need: RankMemory, *, free: int, device: str, less: str = _LESS_OF_THE_REST) -> None:
    """Name the first part that does not fit: an error if it lasts, else a warning. `less`: what makes the others smaller."""
    part = need.shortage(free)
    if part is None:
        return
    fix = _LESS_ACTIVATIONS if part == "activations" else less
    if part in _LASTING:
        raise UserError(
            field="spec.trainer",
            rule=f"needs more memory than {device} has free ({_gib(free)}): its {part} do not fit ({_listed(need)})",
            fix=fix,
        )
    log.warning("memory of a rank: its %s may not fit the %s free on %s; if so, %s", part, _gib(free), device, fix)


def sizes_of(model_path: str, *, trainer: Trainer) -> ModelSizes:
    """By the model's configuration; nothing is allocated."""
    with torch.device("meta"):
        model = load_structure(model_path)
        if trainer.lora is not None:
            from streamrl_workers.models.lora import add_adapters  # peft is loaded where it is asked for

            add_adapters(model, trainer.lora)
        if trainer.sherl is not None:
            train_side_path(model, trainer.sherl)
    config = model.config.get_text_config()
    hidden: int = config.hidden_size
    wide: int = (
        getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call] # transformers'
    inner = {id(p): p.numel() for end in ends if end is not None for p in end.parameters()}
    return ModelSizes(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        matrices=sum(p.numel() for p in muon_parameters(model)),
        embeddings=sum(inner.values()),
        experts=sum(p.numel() for stack in stacks_of(model) for p in stack.parameters()),
        vocabulary=config.vocab_size,
        hidden=hidden,
        feed_forward=wide * (getattr(config, "num_experts_per_tok", None) or 1),
        layers=config.num_hidden_layers,
        positions=getattr(config, "max_position_embeddings", None),
    )


def _listed(need: RankMemory) -> str:
    return ", ".join(f"{part} {_gib(size)}" for part, size in asdict(need).items() if size)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
