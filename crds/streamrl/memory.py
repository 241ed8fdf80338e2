"""Memory of one rank of the trainer, part by part: the plan of a job says it, and the trainer before it loads the model.

An estimate to choose machines by, not a promise: buffers of libraries vary. Pure.
What a layer keeps for the backward pass was counted on Qwen2, Qwen3 and Llama: 10 to 14 hidden sizes and 4 widths of the feed-forward
layer a token, in float32; in bfloat16 the former stay (norms compute in float32). Ranks of a tensor group divide all but 6 hidden sizes
(8 and 10 were counted with 2 ranks, 8 with 4).
"""

from dataclasses import asdict, dataclass, replace

from streamrl.spec.task import Task
from streamrl.spec.training import Trainer

CHUNK_LOGITS = 2**26
"""Logits that are there at once, at least: 256 MiB a copy in float32, 441 tokens of 152k words."""
_CHUNK_SHARE = 512
"""Bytes of a GPU's memory for each logit of a chunk. For each chunk the gradient of the head is read and written, so larger ones are faster."""
PUBLISHED_VERSIONS = 2
"""In main memory at once: the one that generators pull, and the next one."""
_PROMPT_TOKENS = 1024
"""Of a prompt; its length is not known before the data set is read."""
_FLOAT32, _BFLOAT16 = 4, 2
_ADAM_FLOATS = 2
"""First and second moment of each trained weight."""
_LOGIT_COPIES = 3
"""Logits of a chunk, scaled, and their softmax, which becomes their gradient."""
_LAYER_HIDDEN, _LAYER_FEED_FORWARD = 12, 4
"""What a layer keeps for the backward pass, a token."""
_LAYER_WHOLE = 6
"""Hidden sizes of them that each rank of a tensor group keeps: inputs and outputs of norms and of the two halves of a layer."""
_SIDE_WIDTHS = 6
"""What a side path keeps of each layer before it, in widths of its own: features, normed, times the guide, and their gradients."""
_GATHERED_BLOCKS = 3
"""FSDP2 has a block, the next one, and a gradient in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the memory of a model follows from."""

    parameters: int
    trained: int  # parameters with a gradient: all, those of the adapters, or those of side path and last layers
    matrices: int  # of the trained ones, those in matrices of the transformer blocks: `Muon` keeps one moment of each
    embeddings: int  # parameters of embeddings and head, once if they are tied
    experts: int = 0  # parameters of all experts
    vocabulary: int
    hidden: int
    feed_forward: int  # of all experts that a token passes
    layers: int
    positions: int | None = None  # of a sequence at most, where the model says


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the parts, those that cannot be made smaller first."""

    parameters: int
    gradients: int
    optimiser: int
    gathered: int  # layers whose weights are elsewhere, while a rank computes with them
    logits: int  # of a chunk, and the gradient of the head
    publishing: int  # the rows of one tensor, as they are published
    activations: int  # of one pass

    @property
    def states(self) -> int:
        """What lasts from step to step."""
        return self.parameters + self.gradients + self.optimiser

    @property
    def all(self) -> int:
        """At the peak."""
        return sum(asdict(self).values())

    def without_states(self) -> "RankMemory":
        """What is on the GPU where the rest lies in main memory."""
        return replace(self, parameters=0, gradients=0, optimiser=0)

    def shortage(self, free_bytes: int) -> str | None:
        """The first part that does not fit beside those before it; None if all fit."""
        taken = 0
        for part, size in asdict(self).items():
            taken += size
            if taken > free_bytes:
                return part
        return None


def sequence_tokens(task: Task, *, positions: int | None) -> int:
    """Of a sample at most, without what an environment observes."""
    turns = ((1 if one.turns is None else one.turns.max_turns, one.sampling.max_tokens) for one in task.tasks)
    tokens = max(count * tokens for count, tokens in turns) + _PROMPT_TOKENS
    return tokens if positions is None else min(tokens, positions)


def chunk_logits(device_bytes: int = 0) -> int:
    """Return the logits that are there at once. `device_bytes`: all memory of the GPU, 0 without one; not the free one, which differs from start to start."""
    return max(CHUNK_LOGITS, device_bytes // _CHUNK_SHARE)


def rank_memory(
    sizes: ModelSizes,
    *,
    trainer: Trainer,
    task: Task,
    frozen_parameters: int,
    critic: bool,
    target: bool = False,
    device_bytes: int = 0,
) -> RankMemory:
    """Estimate a rank.

    frozen_parameters: of a model beside the policy that is not trained. critic: whether there is a value model; target: and a copy of it.
    device_bytes: as of `chunk_logits`.
    """
    tokens = max(trainer.micro_batch_tokens, sequence_tokens(task, positions=sizes.positions))  # no sample is cut
    tokens = -(-tokens // trainer.parallelism.context)
    number = number_bytes(trainer)
    critic_trained = sizes.parameters if trainer.sherl is None or target else sizes.trained
    trained = sizes.trained + critic_trained * critic
    single = 0 if trainer.optimizer == "AdamW" else sizes.matrices * (1 + (critic and critic_trained == sizes.trained))
    weights = sizes.parameters * (1 + critic + target) + frozen_parameters
    tensor = trainer.parallelism.tensor
    common = sizes.parameters - sizes.embeddings - sizes.experts
    block = (common + sizes.experts // trainer.parallelism.expert) // sizes.layers // tensor
    largest = sizes.vocabulary * sizes.hidden
    head = largest // tensor
    gathered = (_GATHERED_BLOCKS * block + 2 * (sizes.embeddings - largest + head)) * number
    return RankMemory(
        parameters=weights * _FLOAT32 // trainer.replica_ranks,
        gradients=trained * _FLOAT32 // trainer.replica_ranks,
        optimiser=(trained * _ADAM_FLOATS - single) * _FLOAT32 // trainer.replica_ranks,
        gathered=gathered if trainer.sharded else 0,
        logits=(_LOGIT_COPIES * min(chunk_logits(device_bytes), tokens * sizes.vocabulary) + head) * _FLOAT32,
        publishing=largest * number // trainer.replica_ranks,
        activations=tokens * _token_bytes(sizes, trainer=trainer),
    )


def published_bytes(sizes: ModelSizes, *, trainer: Trainer) -> int:
    """Return the bytes of all versions in the main memory of a rank of the first replica, which share what is not trained."""
    base = 0 if not trainer.keeps_base else (sizes.parameters - sizes.trained) * number_bytes(trainer)
    return (base + PUBLISHED_VERSIONS * version_bytes(sizes, trainer=trainer)) // trainer.replica_ranks


def version_bytes(sizes: ModelSizes, *, trainer: Trainer) -> int:
    """Of what a version has that the one before has not: the weights that are trained; adapters are float32."""
    return sizes.trained * (number_bytes(trainer) if trainer.lora is None else _FLOAT32)


def number_bytes(trainer: Trainer) -> int:
    """Of a published weight, and of most activations."""
    return _BFLOAT16 if trainer.number_format == "BF16" else _FLOAT32


def _token_bytes(sizes: ModelSizes, *, trainer: Trainer) -> int:
    """Activations of a token; recomputed ones are there for one layer at a time. Of layers before a side path: what that takes of them."""
    number, sherl = number_bytes(trainer), trainer.sherl
    layers = sizes.layers if sherl is None else min(sizes.layers, sherl.late_layers)
    side = 0
    if sherl is not None:
        side = (sizes.layers - layers + 1) * (sizes.hidden * number + _SIDE_WIDTHS * sherl.width * _FLOAT32)
    tensor = trainer.parallelism.tensor
    hidden = _LAYER_WHOLE + (_LAYER_HIDDEN - _LAYER_WHOLE) / tensor
    layer = int(hidden * sizes.hidden * _FLOAT32 + _LAYER_FEED_FORWARD / tensor * sizes.feed_forward * number)
    if trainer.activation_checkpointing:
        return side + layers * sizes.hidden * number + layer
    return side + layers * layer
