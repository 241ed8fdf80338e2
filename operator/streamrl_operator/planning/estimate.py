"""What a job will need and cost, before anything runs: memory of a trainer rank and of a generator, money per hour.

Memory is an estimate to choose machines by, not a promise: activations and buffers of libraries vary. What is not known
(the size of a model whose config.json is not at hand) is said to be unknown, never guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from streamrl.memory import (
    ModelSizes,
    RankMemory,
    number_bytes,
    published_bytes,
    rank_memory,
    sequence_tokens,
    version_bytes,
)
from streamrl.spec import RLJob, parse_bytes
from streamrl.spec.algorithm import UtteranceCritic
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.model import Model, ScratchModel
from streamrl.spec.training import Trainer

UNKNOWN = "unknown"

_PROCESS_BYTES = 1 << 30
"""Of a process with torch and transformers before its first tensor; 0.86 GB was measured."""
_SCRATCH_VOCABULARY = 100
"""A token for each character: printable ASCII and the special ones."""
_SIMULATED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder with gated feed-forward layers, as config.json names them."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    experts: int = 1
    used_experts: int = 1  # by a token
    tied: bool = True
    positions: int | None = None

    @property
    def parameters(self) -> int:
        """Number of weights; biases and other small ones are left out."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.feed_forward * self.experts
        norms = 2 * self.hidden
        return self.layers * (attention + feed_forward + norms) + self.embeddings + self.hidden

    @property
    def stack(self) -> int:
        """Of them, those of the experts of a layer; 0: it has one feed-forward layer."""
        return 3 * self.hidden * self.feed_forward * self.experts if self.experts > 1 else 0

    @property
    def active_parameters(self) -> int:
        """Of them, those that a token passes."""
        idle = 3 * self.hidden * self.feed_forward * (self.experts - self.used_experts)
        return self.parameters - self.layers * idle

    @property
    def embeddings(self) -> int:
        """Of them, those of embeddings and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_floats(self) -> int:
        """Numbers that the cache holds for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """One pool."""

    name: str
    replicas: tuple[int, int]
    """At the start, at most."""
    bytes_per_replica: int | None
    cache_tokens: int | None
    """Tokens of running samples at most, by slots and by the memory for keys and values; None: not known."""
    cost_per_hour: tuple[Decimal, Decimal]
    """At the start, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEstimate:
    """What a job will need and cost."""

    simulated: bool
    """There is no model."""
    parameters: int | None
    """None: not known."""
    active_parameters: int | None
    """That a token passes."""
    model_bytes: int
    """Of the whole model as it is published; 0: not known."""
    ranks: int
    """Of the trainer."""
    replica_ranks: int
    """That hold one copy of the model."""
    bytes_per_rank: int | None
    """Of the device and of the process; None: the model's size is not known."""
    device_bytes_per_rank: int | None
    """Of the device alone: a GPU, where weights may lie elsewhere."""
    version_bytes: int | None
    """That generators pull of each version, without deltas; None: the model's size is not known."""
    trainer_cost_per_hour: Decimal
    pools: tuple[PoolEstimate, ...]

    @property
    def cost_per_hour(self) -> tuple[Decimal, Decimal]:
        """All together, at the start and at most."""
        start, most = (sum((pool.cost_per_hour[at] for pool in self.pools), Decimal(0)) for at in (0, 1))
        return self.trainer_cost_per_hour + start, self.trainer_cost_per_hour + most

    def lines(self) -> list[str]:
        """For people."""
        ranks = f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"
        copies = self.ranks // self.replica_ranks
        copied = f" in {copies} replicas" if copies > 1 else ""
        return [
            f"model: {'none, the run is simulated' if self.simulated else _parameters(self.parameters)}",
            f"trainer: {ranks}{copied}, {_memory(self.bytes_per_rank)} each, {self.trainer_cost_per_hour} an hour",
            *(
                f"pool {pool.name}: {_range(*pool.replicas)} generators, {_memory(pool.bytes_per_replica)} each, "
                f"{_range(*pool.cost_per_hour)} an hour"
                for pool in self.pools
            ),
            f"all together: {_range(*self.cost_per_hour)} an hour",
        ]


def estimate(job: RLJob, *, config: Mapping[str, Any] | None = None) -> ResourceEstimate:
    """What `job` will need; `config` is the model's config.json where it is at hand (`find_config`)."""
    scratch = job.spec.model.scratch
    architecture = of_scratch(scratch) if scratch is not None else of_config(config or {})
    simulated = not job.spec.has_model
    trainer = job.spec.trainer
    sizes = None if architecture is None else _sizes(job, architecture)
    need = None if simulated or sizes is None else _rank_memory(job, sizes)
    whole = _SIMULATED_BYTES if simulated else None if need is None else need.all
    device = whole if need is None or not trainer.cpu_offload else need.without_states().all
    published = 0 if simulated or sizes is None else published_bytes(sizes, trainer=trainer)
    process = 0 if simulated else _PROCESS_BYTES
    return ResourceEstimate(
        simulated=simulated,
        parameters=None if simulated or architecture is None else architecture.parameters,
        active_parameters=None if simulated or architecture is None else architecture.active_parameters,
        model_bytes=0 if simulated or architecture is None else architecture.parameters * number_bytes(trainer),
        ranks=trainer.ranks,
        replica_ranks=trainer.replica_ranks,
        bytes_per_rank=None if whole is None else whole + published + process,
        device_bytes_per_rank=device,
        version_bytes=_version_bytes(trainer, sizes),
        trainer_cost_per_hour=Decimal(trainer.cost_per_hour),
        pools=tuple(_pool(job, pool=pool, architecture=architecture) for pool in job.spec.generators),
    )


def _version_bytes(trainer: Trainer, sizes: ModelSizes | None) -> int | None:
    if trainer.engine.simulated is not None:
        return trainer.engine.simulated.weight_bytes
    return None if sizes is None else version_bytes(sizes, trainer=trainer)


def of_scratch(model: ScratchModel) -> Architecture:
    """Sizes of the model that `prepare` will build."""
    return Architecture(
        vocabulary=_SCRATCH_VOCABULARY,
        hidden=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.heads,
        head_size=model.hidden_size // model.heads,
        feed_forward=model.intermediate_size,
        positions=model.max_positions,
    )


def of_config(config: Mapping[str, Any]) -> Architecture | None:
    """Sizes by a model's config.json; None if it is of another kind or not whole."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
        feed_forward = (
            config["moe_intermediate_size"] if "moe_intermediate_size" in config else config["intermediate_size"]
        )
        return Architecture(
            vocabulary=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            feed_forward=int(feed_forward),
            experts=experts,
            used_experts=int(config.get("num_experts_per_tok") or 1),
            tied=bool(config.get("tie_word_embeddings", False)),
            positions=int(config.get("max_position_embeddings") or 0) or None,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def find_config(model: Model, *, base_dir: Path, hub_dir: Path) -> Mapping[str, Any] | None:
    """The model's config.json, if it lies on this machine: the one place here that reads files.

    `hub_dir` is the hub's cache (`~/.cache/huggingface/hub`).
    """
    if model.path is not None:
        return _read(base_dir / model.path.directory / "config.json")
    if model.hugging_face is None:
        return None
    repository = hub_dir / f"models--{model.hugging_face.name.replace('/', '--')}"
    revision = model.hugging_face.revision
    if revision.startswith("/") or ".." in revision.split("/"):
        return None  # it would lead out of the cache
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    return _read(repository / "snapshots" / commit / "config.json")


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, Mapping) else None


def _sizes(job: RLJob, architecture: Architecture) -> ModelSizes:
    return ModelSizes(
        parameters=architecture.parameters,
        trained=_trained(job, architecture),
        matrices=_matrices(job, architecture),
        embeddings=architecture.embeddings,
        experts=architecture.layers * architecture.stack,
        vocabulary=architecture.vocabulary,
        hidden=architecture.hidden,
        feed_forward=architecture.feed_forward * architecture.used_experts,
        layers=architecture.layers,
        positions=architecture.positions,
    )


def _rank_memory(job: RLJob, sizes: ModelSizes) -> RankMemory:
    """Of one rank: its share of what lasts, all of its pass. A teacher is taken to be as large as the model."""
    algorithm, trainer = job.spec.algorithm, job.spec.trainer
    measured = getattr(algorithm.value, "reference_kl", None) is not None
    beside = trainer.reference is None and (algorithm.teacher is not None or (measured and trainer.lora is None))
    return rank_memory(
        sizes,
        trainer=trainer,
        task=job.spec.task,
        frozen_parameters=sizes.parameters if beside else 0,
        critic=algorithm.critic is not None,
        target=isinstance(algorithm.critic, UtteranceCritic),
    )


def _trained(job: RLJob, architecture: Architecture) -> int:
    """Weights that have gradients."""
    lora, sherl = job.spec.trainer.lora, job.spec.trainer.sherl
    if sherl is not None:
        late = min(sherl.late_layers, architecture.layers)
        layer = (architecture.parameters - architecture.embeddings) // architecture.layers
        return late * layer + (architecture.layers - late + 2) * sherl.width * architecture.hidden
    if lora is None:
        return architecture.parameters
    inner = architecture.head_size * (architecture.heads + architecture.kv_heads)
    widths = 4 * architecture.hidden + 2 * inner + 3 * (architecture.hidden + architecture.feed_forward)
    return architecture.layers * lora.rank * widths


def _pool(job: RLJob, *, pool: GeneratorPool, architecture: Architecture | None) -> PoolEstimate:
    replicas = (pool.scaling.initial, pool.scaling.most)
    cost = Decimal(pool.cost_per_hour)
    tokens = _cache_tokens(job, pool=pool, architecture=architecture)
    return PoolEstimate(
        name=pool.name,
        replicas=replicas,
        bytes_per_replica=_generator_bytes(job, pool=pool, architecture=architecture, cache_tokens=tokens),
        cache_tokens=tokens,
        cost_per_hour=(cost * replicas[0], cost * replicas[1]),
    )


def _cache_tokens(job: RLJob, *, pool: GeneratorPool, architecture: Architecture | None) -> int | None:
    """Tokens of all slots, or what the job's bound on keys and values holds."""
    if architecture is None or not pool.engine.common.needs_model:
        return None
    engine = pool.engine.value
    tokens: int = engine.slots * sequence_tokens(job.spec.task, positions=architecture.positions)
    if engine.kv_cache_bytes is None:
        return tokens
    return min(tokens, parse_bytes(engine.kv_cache_bytes) // _kv_bytes(job, architecture))


def _kv_bytes(job: RLJob, architecture: Architecture) -> int:
    """Of one token."""
    return architecture.kv_floats * number_bytes(job.spec.trainer)


def _generator_bytes(
    job: RLJob, *, pool: GeneratorPool, architecture: Architecture | None, cache_tokens: int | None
) -> int | None:
    """Weights twice (the next version is pulled while this one is used), the version that it holds where the trainer keeps a base or gives deltas, and the cache: what the job says, else that of all slots."""
    if not pool.engine.common.needs_model:
        return _SIMULATED_BYTES
    if architecture is None or cache_tokens is None:
        return None
    copies = 3 if job.spec.trainer.keeps_base or job.spec.weights.has_deltas else 2
    weights = copies * architecture.parameters * number_bytes(job.spec.trainer)
    return _PROCESS_BYTES + weights + cache_tokens * _kv_bytes(job, architecture)


def _parameters(number: int | None) -> str:
    if number is None:
        return f"{UNKNOWN} number of parameters: its config.json is not at hand, or of another kind"
    for unit, factor in (("billion", 10**9), ("million", 10**6)):
        if number >= factor:
            return f"about {number / factor:.2f} {unit} parameters"
    return f"about {number:,} parameters"


def _memory(number: int | None) -> str:
    return f"{UNKNOWN} memory" if number is None else f"about {number / (1 << 30):.1f} GiB"


def _range(least: int | Decimal, most: int | Decimal) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _matrices(job: RLJob, architecture: Architecture) -> int:
    """Of them, those in matrices of the transformer blocks; the experts of a layer are one stack, no matrix."""
    trainer, trained = job.spec.trainer, _trained(job, architecture)
    if trainer.lora is not None:
        return trained
    blocks = trained if trainer.sherl is not None else trained - architecture.embeddings
    layers = architecture.layers if trainer.sherl is None else min(trainer.sherl.late_layers, architecture.layers)
    return blocks - architecture.stack * layers
