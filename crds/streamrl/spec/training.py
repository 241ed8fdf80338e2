"""How the policy is trained: pipeline, trainer, weights; what follows a failure. The learning rule: `algorithm.py`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl.spec.base import (
    NAME_PATTERN,
    PLACE_PATTERN,
    ByteQuantity,
    ClusterName,
    CostQuantity,
    FieldRule,
    OneOf,
    SpecModel,
    map_by,
)
from streamrl.spec.generators import GeneratorEngine, PoolName
from streamrl.spec.gpus import GPU, enough_gpus, gpus_of_any_maker
from streamrl.spec.pod import TrainerPod

Optimizer = Literal["AdamW", "Muon"]
"""Rules by which gradients become updates."""

NumberFormat = Literal["FP32", "BF16"]
"""Formats of passes and published weights."""

Mode = Literal["Colocated", "Batch", "StreamSync", "StreamAsync"]

ON_POLICY_MODES: tuple[Mode, ...] = ("Colocated", "StreamSync")
"""Modes whose samples are always of the newest weights."""


def _staleness_rule(mode: Mode) -> FieldRule:
    return FieldRule(
        f"maxStalenessSteps must be 0 (or absent) with mode {mode}",
        f"self.mode != '{mode}' || !has(self.maxStalenessSteps) || self.maxStalenessSteps == 0",
        "{self.staleness}",
    )


class Pipeline(SpecModel):
    """How generation and training overlap, and for how long."""

    mode: Mode = Field(
        default="StreamAsync",
        description="Colocated: generators and trainer take turns on the same devices. Batch: apart, whole batches delivered. "
        "StreamSync: samples stream, strictly on-policy. StreamAsync: samples stream and may be `maxStalenessSteps` old.",
    )
    max_staleness_steps: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Largest age of a sample's first token in steps. Colocated, StreamSync: 0; Batch: default 0; StreamAsync: at least 1, default 1.",
    )
    partial_rollouts: bool = Field(
        default=True,
        description="Whether a sample that runs goes on under a new version of the weights, its tokens then being of several versions, each with its log-prob. "
        "False: each sample (with an environment: each turn) is of one version; a generator loads the next when those that run have ended.",
    )
    delivery: Literal["Arrival", "Logical"] = Field(
        default="Arrival",
        description="Arrival: the trainer gets groups as they are scored, and trains on what has come. "
        "Logical: in the order of the prompts, cut by tokens alone, so that runs with different kills have the same weights; the trainer waits for the next group.",
    )
    batch_groups: int = Field(description="Groups (prompts) a training step.", ge=1, le=65_536)
    steps: int = Field(description="Training steps of the run.", ge=1, le=10_000_000)

    @property
    def staleness(self) -> int:
        """S of the staleness rule, in steps."""
        if self.max_staleness_steps is None:
            return 1 if self.mode == "StreamAsync" else 0
        return self.max_staleness_steps

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        *map(_staleness_rule, ON_POLICY_MODES),
        FieldRule(
            "maxStalenessSteps must be at least 1 with mode StreamAsync",
            "self.mode != 'StreamAsync' || !has(self.maxStalenessSteps) || self.maxStalenessSteps >= 1",
            "{self.staleness}",
        ),
        FieldRule(
            "delivery Logical needs maxStalenessSteps 0: which version a sample is of would follow from moments",
            "self.delivery != 'Logical' || "
            "(self.mode != 'StreamAsync' && (!has(self.maxStalenessSteps) || self.maxStalenessSteps == 0))",
            "{self.staleness}",
        ),
    )


class TrainerEngineSpec(SpecModel):
    """What every trainer's engine says of itself, as a `GeneratorEngineSpec` does."""

    needs_model: ClassVar[bool] = True
    """It trains a model."""
    several_ranks: ClassVar[bool] = True
    """Several processes can train together."""


class TorchTrainer(TrainerEngineSpec):
    """Real training with torch."""


class SimulatedTrainer(TrainerEngineSpec):
    """A trainer that only takes time: for tests and scale."""

    needs_model = False
    several_ranks = False

    seconds_per_step: float = Field(default=0.01, ge=0, le=3600, description="Time of one optimiser step, in seconds.")
    seconds_per_token: float = Field(default=0.0, ge=0, le=1, description="Time of one trained token, in seconds.")
    weight_bytes: int = Field(default=4096, ge=1, le=2**31, description="Size of the published weights, in bytes.")


class TrainerEngine(OneOf):
    """What trains."""

    torch: TorchTrainer | None = Field(default=None, description="Real training.")
    simulated: SimulatedTrainer | None = Field(default=None, description="Takes time, learns nothing.")

    @property
    def common(self) -> TrainerEngineSpec:
        """The chosen engine, as far as all are alike."""
        chosen: TrainerEngineSpec = self.value
        return chosen


_LONE_ENGINES = TrainerEngine.those(lambda engine: not engine.several_ranks)


class Lora(SpecModel):
    """Low-rank adapters (arXiv 2106.09685); generators get the base once, then the adapters of each version."""

    rank: int = Field(default=16, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, le=1e6, description="The adapters' product is scaled by alpha / rank.")
    target_modules: tuple[Annotated[str, StringConstraints(min_length=1, max_length=128)], ...] = Field(
        default=(),
        max_length=64,
        description="Names of the layers that get adapters, each of linear layers; empty = all linear ones but the head.",
    )


class Sherl(SpecModel):
    """The last layers and a side path to them (SHERL, arXiv 2407.07523); nothing is kept for a backward pass through the layers before."""

    late_layers: int = Field(default=2, ge=1, le=1024, description="Layers at the end that are trained in full.")
    width: int = Field(
        default=64, ge=1, le=4096, description="Width of the side path, which merges the hidden states before them."
    )


class LogprobDiffBound(SpecModel):
    """When the generators' log-probs are too far from the trainer's, on samples whose tokens are all of the newest weights."""

    max_mean: float = Field(
        default=0.05,
        gt=0,
        le=100,
        description="Largest mean of |trainer's - generator's log-prob| over a step's tokens of one pool; the usual is 0.01 with BF16, far less with FP32.",
    )
    steps: int = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Steps in a row above it before the condition TrainInferLogprobDiffHigh.",
    )


class ReferenceSpec(SpecModel):
    """Who says how likely tokens are to the frozen model: the initial one, or the teacher of `distillation`."""

    pool: PoolName = Field(
        description=f"Name of a pool of `generators`, with engine {GeneratorEngine.those(lambda engine: engine.scores_frozen)}. Its generators load the frozen model themselves, and generate nothing."
    )


class Parallelism(SpecModel):
    """How ranks divide the model and the samples; what remains of the ranks shards the model."""

    replicate: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Copies of the sharded model. Weights are gathered within a copy, and only sums of gradients pass between copies. 1 = all ranks share one.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks of one node that compute each layer together, on the same samples. 1 = each rank computes whole layers.",
    )
    context: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks that share the tokens of each pass, for long samples: activations of a rank are 1/context. 1 = each rank has samples of its own.",
    )

    expert: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Ranks that divide the experts of each layer, and exchange the tokens of their samples. 1 = each rank computes all experts.",
    )

    @property
    def copies(self) -> int:
        """Ranks that get the same samples."""
        return self.tensor * self.context


class Trainer(SpecModel):
    """The trainer and its optimiser."""

    engine: TrainerEngine = Field(
        default_factory=lambda: TrainerEngine.model_validate({"torch": {}}), description="What trains."
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Pods that train together, each with processesPerNode ranks; above 1 all write to one volume of checkpoints (ReadWriteMany).",
    )
    processes_per_node: int = Field(
        default=1, ge=1, le=64, description="Ranks: processes that share the model (FSDP2); one for each GPU."
    )
    parallelism: Parallelism = Field(
        default=Parallelism(), description="How ranks divide the model; the default shards it over all of them."
    )
    rank_timeout_seconds: float = Field(
        default=300.0,
        ge=5,
        le=86_400,
        description="Longest wait of one rank for another; then all begin again at the checkpoint.",
    )
    optimizer: Optimizer = Field(
        default="AdamW",
        description="Muon (arXiv 2502.16982): for the matrices of the transformer blocks, whose steps have the size of AdamW's; the rest by AdamW.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Peak learning rate.")
    schedule: Literal["Constant", "Linear", "Cosine"] = Field(
        default="Constant", description="Fall of the learning rate after its rise."
    )
    warm_up_steps: int = Field(default=0, ge=0, le=1_000_000, description="Steps of linear rise.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Decoupled weight decay.")
    gradient_clip_norm: float = Field(default=1.0, gt=0, le=1e6, description="Largest gradient norm.")
    micro_batch_tokens: int = Field(
        default=16_384,
        ge=16,
        le=16_777_216,
        description="Tokens (prompts, completions, padding) of one forward pass.",
    )
    micro_batch_layout: Literal["Auto", "Packed", "Padded"] = Field(
        default="Auto",
        description="Packed: samples of a pass in one row, without padding. Padded: a row each. Auto: Packed on processors if possible, and with parallelism.context.",
    )
    precision: Literal["Auto", "FP32", "TF32", "BF16"] = Field(
        default="Auto",
        description="BF16: passes and published weights in bfloat16, where the hardware has it; weights and optimiser stay in float32. "
        "TF32: FP32, and the trainer's GPUs multiply matrices in TF32. Auto: BF16 if the pod asks for a GPU, else FP32.",
    )
    reduce_dtype: NumberFormat = Field(
        default="FP32",
        description="Number format in which ranks sum their gradients. BF16 halves the bytes between ranks, and rounds each summand.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute activations again in the backward pass: less memory, a third more time."
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep weights, gradients and optimiser in main memory; a block is on the GPU while it computes. Slower: the optimiser runs on the processor.",
    )
    compile: bool = Field(
        default=False,
        description="Compile each transformer block (torch.compile); needs a C++ compiler, and Triton on a GPU. Each new kind of shape costs a minute.",
    )
    train_infer_logprob_diff: LogprobDiffBound = Field(
        default=LogprobDiffBound(), description="When to warn of generators that compute another policy."
    )
    reference: ReferenceSpec | None = Field(
        default=None, description="A pool that says the frozen model's log-probs; absent = the trainer does so itself."
    )
    lora: Lora | None = Field(default=None, description="Train low-rank adapters only; absent = all weights.")
    sherl: Sherl | None = Field(
        default=None,
        description="Train a side path and the last layers only; with generators of engine "
        f"{GeneratorEngine.those(lambda engine: engine.side_path)}.",
    )
    disruption: Literal["Allow", "Block"] = Field(
        default="Allow", description="Block: the trainer's pods stop drains of their nodes until the job has ended."
    )
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost of the trainer; weighs its bubbles.")
    cluster_name: ClusterName | None = Field(
        default=None,
        description="On Kubernetes: the RLCluster that its pods and volumes are in, the scheduler with them; absent = the job's own cluster.",
    )
    pod: TrainerPod = Field(
        default=TrainerPod(),
        description="Its pods on Kubernetes, one a node; resources are those of the trainer's container.",
    )

    @property
    def ranks(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.processes_per_node

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.ranks // self.parallelism.replicate

    @property
    def number_format(self) -> NumberFormat:
        """Format of passes and of published weights. It follows from the job alone, so all its processes agree."""
        if self.precision == "Auto":
            asks = self.pod.resource_claims or gpus_of_any_maker(self.pod.resources.limits)
            return "BF16" if asks else "FP32"
        return "BF16" if self.precision == "BF16" else "FP32"

    @property
    def sharded(self) -> bool:
        """Whether a rank computes with weights that it gathers block by block, in the format of the pass; alone it is a mesh of one."""
        return self.ranks > 1 or self.cpu_offload or self.number_format == "BF16"

    @property
    def keeps_base(self) -> bool:
        """Whether most weights stay as they began: versions share them, and checkpoints leave them out."""
        return self.lora is not None or self.sherl is not None

    @property
    def unmerged_lora(self) -> Lora | None:
        """Adapters that generators compute beside the base: below float32 a merge would round small updates away."""
        return self.lora if self.number_format == "BF16" else None

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            f"nodes must be 1 with engine {_LONE_ENGINES}",
            f"!{_LONE_ENGINES.cel('self.engine')} || self.nodes == 1",
            "{self.nodes}",
        ),
        FieldRule(
            f"processesPerNode must be 1 with engine {_LONE_ENGINES}",
            f"!{_LONE_ENGINES.cel('self.engine')} || self.processesPerNode == 1",
            "{self.processes_per_node}",
        ),
        enough_gpus(
            field="processesPerNode",
            why="each rank takes a GPU of its own",
            others="false",
            number="self.processesPerNode",
            got=f"{{self.processes_per_node}} and {{self.pod.resources.limits[{GPU}]}}",
        ),
        FieldRule(
            "parallelism.replicate x tensor x context must divide the number of ranks (nodes x processesPerNode)",
            "self.nodes * self.processesPerNode % (self.parallelism.replicate * self.parallelism.tensor * self.parallelism.context) == 0",
            "{self.parallelism.replicate} x {self.parallelism.tensor} x {self.parallelism.context} and {self.ranks} ranks",
        ),
        FieldRule(
            "parallelism.tensor must divide processesPerNode: its ranks lie on one node",
            "self.processesPerNode % self.parallelism.tensor == 0",
            "{self.parallelism.tensor} and {self.processes_per_node}",
        ),
        FieldRule(
            "parallelism.tensor must be 1 (or absent) with lora, sherl, compile or cpuOffload",
            "self.parallelism.tensor == 1 || (!has(self.lora) && !has(self.sherl) && !self.compile && !self.cpuOffload)",
            "{self.parallelism.tensor}",
        ),
        FieldRule(
            "parallelism.context must be 1 (or absent) with sherl, compile or cpuOffload",
            "self.parallelism.context == 1 || (!has(self.sherl) && !self.compile && !self.cpuOffload)",
            "{self.parallelism.context}",
        ),
        FieldRule(
            "microBatchLayout must be Auto or Packed with parallelism.context: ranks share the tokens of one row",
            "self.parallelism.context == 1 || self.microBatchLayout != 'Padded'",
            "{self.micro_batch_layout}",
        ),
        FieldRule(
            "parallelism.replicate x parallelism.expert must divide the number of ranks (nodes x processesPerNode)",
            "self.nodes * self.processesPerNode % (self.parallelism.replicate * self.parallelism.expert) == 0",
            "{self.parallelism.replicate} x {self.parallelism.expert} and {self.ranks} ranks",
        ),
        FieldRule(
            "parallelism.expert must be 1 (or absent) with parallelism.tensor, lora, sherl, compile or cpuOffload",
            "self.parallelism.expert == 1 || (self.parallelism.tensor == 1 && !has(self.lora) && !has(self.sherl) && "
            "!self.compile && !self.cpuOffload)",
            "{self.parallelism.expert}",
        ),
        FieldRule(
            "of lora and sherl only one can be there",
            "!has(self.lora) || !has(self.sherl)",
        ),
        FieldRule(
            "reduceDtype must be FP32 (or absent) with precision FP32 or TF32: gradients would lose what the passes computed",
            "self.reduceDtype == 'FP32' || self.precision == 'BF16' || self.precision == 'Auto'",
            "{self.reduce_dtype}",
        ),
    )


class HttpWeights(SpecModel):
    """Weights pulled over HTTP by the hashes of their bytes, several streams at once."""

    timeout_seconds: float = Field(
        default=120.0, gt=0, le=86_400, description="Longest time for one version, retries included."
    )
    deltas: bool = Field(
        default=False,
        description="Send what changed since the version before to who holds that: for generators behind a slow link. Takes the trainer's processors, and main memory of a version in each generator.",
    )
    remote_bytes_per_second: ByteQuantity | None = Field(
        default=None,
        description="Most that the trainer sends to each cluster but its own in a second, as 25M; absent = no bound.",
    )
    uplink_bytes_per_second: ByteQuantity | None = Field(
        default=None,
        description="Most that the trainer sends to all clusters but its own together in a second, as 100M. With it they take each version one after the other, "
        "and one that would not have it before the next is left out of it; absent = no bound, and all at once.",
    )


class FolderWeights(SpecModel):
    """Weights written to a folder by the trainer, and read there by generators, by the hashes of their bytes."""

    url: str = Field(
        max_length=1024,
        pattern=PLACE_PATTERN,
        description="Folder of an object store, as `s3://bucket/folder`, or a directory that trainer and generators have mounted at this absolute path. A job has a folder of its own in it.",
    )
    timeout_seconds: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="Longest time to write one version, and to read it; retries included.",
    )
    deltas: bool = Field(
        default=False,
        description="Write what changed since the version before too, for those who hold that: generators read less. Takes the trainer's processors, and main memory of a version in each generator.",
    )


class Weights(OneOf):
    """How weights reach the generators."""

    http: HttpWeights | None = Field(default=None, description="Pulled over HTTP.")
    folder: FolderWeights | None = Field(
        default=None,
        description="Through an object store or a shared directory; generators need no way to the trainer.",
    )

    @property
    def has_deltas(self) -> bool:
        """Whether deltas are made, and what they lead from is held."""
        return any(one is not None and one.deltas for one in (self.http, self.folder))

    @property
    def has_uplink(self) -> bool:
        """Whether all other clusters share one bounded link."""
        return self.http is not None and self.http.uplink_bytes_per_second is not None


class FailureRule(SpecModel):
    """What happens when a container of a pod ends with an error, or a pod is lost, on Kubernetes."""

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=32)] = Field(
        description="Name of the rule; events name it."
    )
    role: Literal["Generator", "Trainer", "Scheduler", "Agents"] | None = Field(
        default=None, description="Of this role; absent = all."
    )
    on_reasons: tuple[Literal["Preempted", "Evicted", "NodeLost", "Rejected", "OOMKilled", "Deleted", "Error"], ...] = (
        Field(
            default=(),
            max_length=7,
            description=(
                "For one of these reasons. Rejected: by a node's kubelet, before a container started; Evicted: by a kubelet, "
                "or as the node shut down; Deleted: by a person or a drain; Error: an exit code other than 0. Empty = all."
            ),
        )
    )
    on_exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        default=(), max_length=32, description="With one of these exit codes; empty = all."
    )
    action: Literal["FailJob", "Restart", "ReplacePodAndIgnoreMaxRestarts"] = Field(
        description="FailJob: the job has failed. Restart: counts towards maxRestarts. ReplacePodAndIgnoreMaxRestarts: does not count."
    )


class FailurePolicy(SpecModel):
    """What happens when a process dies."""

    max_restarts: int = Field(
        default=5, ge=0, le=10_000, description="Restarts of all processes together before the run fails."
    )
    rules: tuple[FailureRule, ...] = Field(
        default=(),
        max_length=16,
        description=(
            "On Kubernetes, before the rest: the first that matches decides. Without a match exit code 2 fails the job, "
            "pods that were preempted, evicted, rejected, deleted or lost with their node do not count, and all else counts."
        ),
        json_schema_extra=map_by("name"),
    )
