"""Generator pools: engine, size, cost."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints
from pydantic.alias_generators import to_camel

from streamrl import names
from streamrl.spec import vllm_arguments
from streamrl.spec.base import (
    NAME_PATTERN,
    ByteQuantity,
    ClusterName,
    CostQuantity,
    FieldRule,
    OneOf,
    SpecModel,
)
from streamrl.spec.gpus import GPU, enough_gpus
from streamrl.spec.pod import GeneratorPod
from streamrl.spec.volumes import WeightCacheSpec

ArgumentValue = Annotated[str, StringConstraints(max_length=1024)]
PoolName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=names.MOST_POOL_CHARACTERS)]


class GeneratorEngineSpec(SpecModel):
    """What every engine says of itself; what others ask of an engine, they ask here and not by its name.

    Each has `slots`, and one with a model `kv_cache_bytes` too.
    """

    needs_model: ClassVar[bool] = True
    """It computes a model: it needs a folder with configuration and tokenizer, and the trainer's weights."""
    own_processes: ClassVar[bool] = False
    """It computes by itself in processes of its own, which share memory with the generator's."""
    pauses: ClassVar[bool] = True
    """It computes between two steps and at no other time, so it can be kept from computing."""
    most_local: ClassVar[int] = 64
    """Generators of a local run: a process with transformers holds about 0.9 GB before its first token."""
    scores_frozen: ClassVar[bool] = False
    """It can say log-probs of a frozen model: its line in the registry has `create_frozen`."""
    side_path: ClassVar[bool] = False
    """It computes the side path of `trainer.sherl`."""
    whole_logprobs: ClassVar[bool] = True
    """Its log-probs are those before topK and topP, as the trainer's are."""
    has_gpu_kernels: ClassVar[bool] = True
    """It keeps a GPU busy: another engine is not several times faster there."""
    own_traces: ClassVar[bool] = False
    """It sends traces of its own to where the job's go."""
    devices_field: ClassVar[str] = ""
    """The field that says how many devices share the model; empty: always one."""
    alone_with: ClassVar[Mapping[str, bool | int] | None] = None
    """Fields and values; with one of these the bits of a sample follow from no other sample. Empty: they always do; None: never."""

    @property
    def devices(self) -> int:
        """That one replica computes on."""
        return 1

    @property
    def quantized(self) -> bool:
        """Whether it rounds the trainer's weights."""
        return False

    @property
    def computes_alone(self) -> bool:
        """Whether what it makes of a sample follows from no other."""
        given = self.alone_with
        return given is not None and (not given or any(getattr(self, name) == given[name] for name in given))


class HfEngineSpec(GeneratorEngineSpec):
    """Continuous batching over a transformers model, on CPU or GPU."""

    has_gpu_kernels = False
    scores_frozen = True
    side_path = True
    alone_with: ClassVar[Mapping[str, bool | int]] = {"batch_invariant": True, "slots": 1}

    slots: int = Field(default=64, ge=1, le=4096, description="Sequences generated at once.")
    kv_cache_bytes: ByteQuantity | None = Field(
        default=None,
        description="Memory for keys and values; absent = half of what is free when the engine starts.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Whether tokens and log-probs of a sample of one version are the same, bit for bit, in every batch and after a takeover; slower.",
    )


DraftTokens = Annotated[int, Field(ge=1, le=64)]


class NgramSpeculation(SpecModel):
    """Drafts are what followed the last tokens where they stood before, in the same prompt and completion."""

    draft_tokens: DraftTokens = Field(default=4, description="Tokens of a draft at most.")
    min_match_tokens: int = Field(default=2, ge=1, le=64, description="Last tokens that must be found again, at least.")
    max_match_tokens: int = Field(default=5, ge=1, le=64, description="As many as this are looked for first.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "minMatchTokens must be at most maxMatchTokens",
            "self.minMatchTokens <= self.maxMatchTokens",
            "{self.min_match_tokens} and {self.max_match_tokens}",
        ),
    )


class SuffixSpeculation(SpecModel):
    """Suffix decoding (arXiv 2411.04975): drafts come from earlier completions too; needs the package arctic-inference."""

    draft_tokens: DraftTokens = Field(default=24, description="Tokens of a draft at most.")
    cached_completions: int = Field(
        default=10_000, ge=0, le=10_000_000, description="Completions that drafts come from; 0 = its own prompt alone."
    )
    min_probability_percent: int = Field(
        default=10, ge=0, le=100, description="Tokens that followed less often than this are not drafted."
    )


class Speculation(OneOf):
    """Drafts that the model checks several tokens at once; they change how fast it generates, not what is likely."""

    ngram: NgramSpeculation | None = Field(default=None, description="From the sample itself.")
    suffix: SuffixSpeculation | None = Field(default=None, description="From earlier completions too.")


class VllmEngineSpec(GeneratorEngineSpec):
    """vLLM: on GPUs, or its CPU build."""

    own_processes = True
    pauses = False
    most_local = 16
    whole_logprobs = False
    own_traces = True
    devices_field = "tensorParallelSize"

    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="Devices that share the model.")
    max_concurrency: int = Field(default=256, ge=1, le=4096, description="Sequences generated at once.")
    gpu_memory_percent: int = Field(
        default=90, ge=1, le=100, description="Share of each GPU's memory that vLLM takes; not used on CPUs."
    )
    kv_cache_bytes: ByteQuantity | None = Field(
        default=None,
        description="Memory for keys and values; absent = what gpuMemoryPercent leaves, on CPUs 1Gi.",
    )
    quantization: Annotated[str, StringConstraints(pattern="^[a-z0-9_-]+$", max_length=32)] | None = Field(
        default=None, description="Method by vLLM's name, as fp8; weights are quantized at each update."
    )
    prefix_caching: bool = Field(default=True, description="Samples of a group share the prompt's keys and values.")
    speculative: Speculation | None = Field(default=None, description="Speculative decoding; absent = none.")
    extra_args: dict[str, ArgumentValue] = Field(
        default_factory=dict,
        max_length=32,
        description="More arguments of vLLM's AsyncEngineArgs by name, each value as JSON or plain text.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "extraArgs must not hold what StreamRL sets: leave it out",
            f"self.extraArgs.all(name, !(name in {list(vllm_arguments.FIXED)}))",
            "{name}",
        ),
    )

    @property
    def slots(self) -> int:
        """Sequences at once, by the name that all engines have for it."""
        return self.max_concurrency

    @property
    def devices(self) -> int:
        """That share the model."""
        return self.tensor_parallel_size

    @property
    def quantized(self) -> bool:
        """Whether vLLM quantizes the weights."""
        return self.quantization is not None


class PtlPoint(SpecModel):
    """Per-token latency at one batch size."""

    batch: int = Field(ge=1, le=1_000_000, description="Active sequences.")
    milliseconds: float = Field(gt=0, le=60_000, description="Time of one decoding step, in milliseconds.")


class SimulatedEngineSpec(GeneratorEngineSpec):
    """An engine that only takes time: per-token latency by batch size, drawn lengths."""

    needs_model = False
    most_local = 1024
    alone_with: ClassVar[Mapping[str, bool | int]] = {}

    slots: int = Field(default=64, ge=1, le=65_536, description="Sequences generated at once.")
    latency: tuple[PtlPoint, ...] = Field(
        default=(PtlPoint(batch=1, milliseconds=1.0),),
        min_length=1,
        max_length=64,
        description="Curve, linear between its points, by rising batch.",
    )
    time_scale: float = Field(default=1.0, ge=0, le=1000, description="Factor on all times; 0 = as fast as possible.")
    mean_tokens: float = Field(
        default=32.0, ge=1, le=1_000_000, description="Median of the log-normal lengths, in tokens."
    )
    sigma: float = Field(default=0.5, ge=0, le=4, description="Spread of the log-normal lengths.")
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**40,
        description="Tokens of prompts and completions that it says it has memory for; absent = it says nothing.",
    )
    correct_percent: int = Field(
        default=50, ge=0, le=100, description="Share of completions that equal the reference answer."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "latency must be given by rising batch",
            "self.latency.map(p, p.batch).isSorted() && self.latency.all(p, self.latency.exists_one(o, o.batch == p.batch))",
            lambda engine: [point.batch for point in engine.latency],
        ),
    )


class GeneratorEngine(OneOf):
    """What generates."""

    hf: HfEngineSpec | None = Field(default=None, description="transformers with continuous batching.")
    simulated: SimulatedEngineSpec | None = Field(default=None, description="Takes time, generates noise.")
    vllm: VllmEngineSpec | None = Field(default=None, description="vLLM, in processes of its own.")

    @property
    def common(self) -> GeneratorEngineSpec:
        """The chosen engine, as far as all are alike."""
        chosen: GeneratorEngineSpec = self.value
        return chosen

    @classmethod
    def alone(cls, at: str) -> tuple[str, str]:
        """When the engine at `at` computes each sample alone: for a rule's message, and as CEL."""
        kinds = ((key, kind.alone_with) for key, kind in cls.kinds().items() if kind.alone_with is not None)
        texts, ways = [], []
        for key, fields in sorted(kinds, key=lambda kind: len(kind[1])):
            values = [(to_camel(name), "" if value is True else str(value)) for name, value in fields.items()]
            names = " or ".join(f"{name} {value}".strip() for name, value in values)
            cel = " || ".join(f"{at}.{key}.{name}" + (f" == {value}" if value else "") for name, value in values)
            texts.append(f"{key} with {names}" if values else key)
            ways.append(f"(has({at}.{key}) && ({cel}))" if values else f"has({at}.{key})")
        return ", or ".join(texts), " || ".join(ways)


_SHARED_ENGINES = {key: kind.devices_field for key, kind in GeneratorEngine.kinds().items() if kind.devices_field}
"""Engine -> its field with the number of devices that share the model."""
_RESTLESS_ENGINES = GeneratorEngine.those(lambda engine: not engine.pauses)


class StaticScaling(SpecModel):
    """A fixed number of replicas."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Generator processes.")


class AutoScaling(SpecModel):
    """As many replicas as the queue and the trainer's pace ask for."""

    initial_replicas: int | None = Field(
        default=None, ge=1, le=1024, description="Generator processes at the start; absent = minReplicas."
    )
    min_replicas: int = Field(default=1, ge=1, le=1024, description="Never fewer.")
    max_replicas: int = Field(description="Never more.", ge=1, le=1024)
    cooldown_seconds: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="Least time between two changes, and for a new replica to show its effect.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "minReplicas, initialReplicas, maxReplicas must not fall",
            "(!has(self.minReplicas) || self.minReplicas <= self.maxReplicas) && (!has(self.initialReplicas) || "
            "((!has(self.minReplicas) || self.minReplicas <= self.initialReplicas) && self.initialReplicas <= self.maxReplicas))",
            "{self.min_replicas}, {self.initial}, {self.max_replicas}",
        ),
    )

    @property
    def initial(self) -> int:
        """Replicas at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


class ExternalScaling(SpecModel):
    """As many replicas as somebody else sets: `kubectl scale`, an HPA, KEDA; a local run keeps the first number."""

    initial_replicas: int = Field(default=1, ge=1, le=1024, description="Generator processes at the start.")

    @property
    def initial(self) -> int:
        """Replicas at the start."""
        return self.initial_replicas


class Scaling(OneOf):
    """How many replicas a pool has."""

    static: StaticScaling | None = Field(default=None, description="A fixed number.")
    auto: AutoScaling | None = Field(default=None, description="By queue depth, between bounds.")
    external: ExternalScaling | None = Field(default=None, description="By somebody else, through /scale of the pool.")

    @property
    def initial(self) -> int:
        """Replicas at the start."""
        return int(self.static.replicas if self.static is not None else self.value.initial)

    @property
    def most(self) -> int:
        """Replicas at most in a local run."""
        return int(self.auto.max_replicas if self.auto is not None else self.initial)


class GeneratorPool(SpecModel):
    """Generators of one kind."""

    name: PoolName = Field(
        description=f"Name of the pool; with the job's at most {names.MOST_SET_CHARACTERS - 1} characters."
    )
    engine: GeneratorEngine = Field(description="What generates.")
    scaling: Scaling = Field(
        default_factory=lambda: Scaling.model_validate({"static": {"replicas": 1}}), description="How many replicas."
    )
    devices: Literal["Own", "Trainer"] | None = Field(
        default=None,
        description="Own: they generate all the time. Trainer: in a local run, on the trainer's devices while it waits for samples, and paused while it works; "
        "other pools go on. Absent = Own, with mode Colocated Trainer.",
    )
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost of one replica; weighs its bubbles.")
    weight_cache: WeightCacheSpec | None = Field(
        default=None,
        description="Where weights lie nearer than the trainer; absent = each generator pulls all of them.",
    )
    cluster_name: ClusterName | None = Field(
        default=None, description="On Kubernetes: the RLCluster that its pods are in; absent = the job's own cluster."
    )
    pod: GeneratorPod = Field(default=GeneratorPod(), description="Its pods on Kubernetes.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            f"name must not be {', '.join(names.OWN_SUFFIXES)}: the job's own objects have those",
            f"!(self.name in {list(names.OWN_SUFFIXES)})",
            "{self.name}",
        ),
        FieldRule(
            f"devices Trainer needs engine {GeneratorEngine.those(lambda engine: engine.pauses)}: "
            f"{_RESTLESS_ENGINES} does not stop between two steps",
            f"!has(self.devices) || self.devices != 'Trainer' || !{_RESTLESS_ENGINES.cel('self.engine')}",
            "{self.engine.key}",
        ),
        FieldRule(
            "scaling must not be auto with devices Trainer: more generators would share the same devices",
            "!has(self.devices) || self.devices != 'Trainer' || !has(self.scaling) || !has(self.scaling.auto)",
        ),
        *(
            enough_gpus(
                field=field,
                why="a generator is one pod, on one node",
                others=f"!has(self.engine.{engine})",
                number=f"self.engine.{engine}.{field}",
                got=f"{{self.engine.common.devices}} and {{self.pod.resources.limits[{GPU}]}}",
            )
            for engine, field in _SHARED_ENGINES.items()
        ),
    )
