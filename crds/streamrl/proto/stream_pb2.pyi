from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("data", "more")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    more: bool
    def __init__(self, data: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class VersionName(_message.Message):
    __slots__ = ("attempt", "step", "hash")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    hash: bytes
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., hash: _Optional[bytes] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "slices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    slices: _containers.RepeatedCompositeFieldContainer[TensorSlice]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., slices: _Optional[_Iterable[_Union[TensorSlice, _Mapping]]] = ...) -> None: ...

class TensorSlice(_message.Message):
    __slots__ = ("hash", "size_bytes", "holder", "first_row")
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    size_bytes: int
    holder: int
    first_row: int
    def __init__(self, hash: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., holder: _Optional[int] = ..., first_row: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "tensors", "hash_algorithm", "deltas", "holders")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    hash_algorithm: str
    deltas: _containers.RepeatedCompositeFieldContainer[TensorDelta]
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., hash_algorithm: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[TensorDelta, _Mapping]]] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class TensorDelta(_message.Message):
    __slots__ = ("base_hash", "new_hash", "hash", "size_bytes", "holder")
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    NEW_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    base_hash: bytes
    new_hash: bytes
    hash: bytes
    size_bytes: int
    holder: int
    def __init__(self, base_hash: _Optional[bytes] = ..., new_hash: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., holder: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("family", "short", "long")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    LONG_FIELD_NUMBER: _ClassVar[int]
    family: str
    short: ScoredTokens
    long: ScoredTokens
    def __init__(self, family: _Optional[str] = ..., short: _Optional[_Union[ScoredTokens, _Mapping]] = ..., long: _Optional[_Union[ScoredTokens, _Mapping]] = ...) -> None: ...

class ScoredTokens(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "size_bytes", "hash", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    hash: bytes
    data: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., hash: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("lease", "group_id", "sample_index", "prompt", "prefix_tokens", "sampling", "seed", "pinned", "context_tokens", "observation", "traceparent", "has_turns", "finished")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HAS_TURNS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    lease: int
    group_id: int
    sample_index: int
    prompt: str
    prefix_tokens: bytes
    sampling: Sampling
    seed: int
    pinned: bool
    context_tokens: int
    observation: str
    traceparent: str
    has_turns: bool
    finished: Sample
    def __init__(self, lease: _Optional[int] = ..., group_id: _Optional[int] = ..., sample_index: _Optional[int] = ..., prompt: _Optional[str] = ..., prefix_tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., pinned: _Optional[bool] = ..., context_tokens: _Optional[int] = ..., observation: _Optional[str] = ..., traceparent: _Optional[str] = ..., has_turns: _Optional[bool] = ..., finished: _Optional[_Union[Sample, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("lease", "tokens", "logprobs", "spans", "finish_reason", "text", "prompt_tokens", "error", "generate_s", "observation_tokens")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    tokens: bytes
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: str
    text: str
    prompt_tokens: bytes
    error: str
    generate_s: float
    observation_tokens: bytes
    def __init__(self, lease: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., text: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., error: _Optional[str] = ..., generate_s: _Optional[float] = ..., observation_tokens: _Optional[bytes] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("tokens", "step", "attempt")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    step: int
    attempt: int
    def __init__(self, tokens: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("tokens", "observation", "reward", "context")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    observation: bool
    reward: float
    context: bool
    def __init__(self, tokens: _Optional[int] = ..., observation: _Optional[bool] = ..., reward: _Optional[float] = ..., context: _Optional[bool] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("group_id", "sample_index", "prompt_tokens", "tokens", "logprobs", "spans", "finish_reason", "reward", "reward_parts", "reward_error", "generator_id", "generate_s", "segments", "ended_at", "weight", "resampled", "reference_logprobs")
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    REWARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RESAMPLED_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    sample_index: int
    prompt_tokens: bytes
    tokens: bytes
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: str
    reward: float
    reward_parts: _containers.ScalarMap[str, float]
    reward_error: str
    generator_id: str
    generate_s: float
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    ended_at: float
    weight: float
    resampled: bool
    reference_logprobs: bytes
    def __init__(self, group_id: _Optional[int] = ..., sample_index: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., reward: _Optional[float] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., reward_error: _Optional[str] = ..., generator_id: _Optional[str] = ..., generate_s: _Optional[float] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., ended_at: _Optional[float] = ..., weight: _Optional[float] = ..., resampled: _Optional[bool] = ..., reference_logprobs: _Optional[bytes] = ...) -> None: ...

class TurnState(_message.Message):
    __slots__ = ("prompt_index", "tokens", "prompt_hash")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    tokens: bytes
    prompt_hash: bytes
    def __init__(self, prompt_index: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_hash: _Optional[bytes] = ...) -> None: ...

class GeneratorEvent(_message.Message):
    __slots__ = ("hello", "progress", "heartbeat", "weights_loaded", "weights_failed", "drained", "weights_stalled", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LOADED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_STALLED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: GeneratorHello
    progress: ProgressBatch
    heartbeat: Heartbeat
    weights_loaded: WeightsLoaded
    weights_failed: WeightsFailed
    drained: Drained
    weights_stalled: WeightsStalled
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[GeneratorHello, _Mapping]] = ..., progress: _Optional[_Union[ProgressBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., weights_loaded: _Optional[_Union[WeightsLoaded, _Mapping]] = ..., weights_failed: _Optional[_Union[WeightsFailed, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., weights_stalled: _Optional[_Union[WeightsStalled, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class GeneratorHello(_message.Message):
    __slots__ = ("generator_id", "instance", "pool", "slots", "version", "kv_capacity_tokens", "cluster", "weights_address", "shares_prompts")
    GENERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    generator_id: str
    instance: str
    pool: str
    slots: int
    version: VersionName
    kv_capacity_tokens: int
    cluster: str
    weights_address: str
    shares_prompts: bool
    def __init__(self, generator_id: _Optional[str] = ..., instance: _Optional[str] = ..., pool: _Optional[str] = ..., slots: _Optional[int] = ..., version: _Optional[_Union[VersionName, _Mapping]] = ..., kv_capacity_tokens: _Optional[int] = ..., cluster: _Optional[str] = ..., weights_address: _Optional[str] = ..., shares_prompts: _Optional[bool] = ...) -> None: ...

class ProgressBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, items: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("steps", "tokens", "seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    seconds: float
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("active", "waiting", "bubble_seconds", "wall_seconds", "tokens", "step_times", "kv_used_tokens")
    class BubbleSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StepTimesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: StepTimes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[StepTimes, _Mapping]] = ...) -> None: ...
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    active: int
    waiting: int
    bubble_seconds: _containers.ScalarMap[str, float]
    wall_seconds: float
    tokens: int
    step_times: _containers.MessageMap[int, StepTimes]
    kv_used_tokens: int
    def __init__(self, active: _Optional[int] = ..., waiting: _Optional[int] = ..., bubble_seconds: _Optional[_Mapping[str, float]] = ..., wall_seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., step_times: _Optional[_Mapping[int, StepTimes]] = ..., kv_used_tokens: _Optional[int] = ...) -> None: ...

class WeightsLoaded(_message.Message):
    __slots__ = ("version", "engine_hash", "fetch_s", "load_s", "waited_s", "load_parts")
    class LoadPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_HASH_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_PARTS_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    engine_hash: bytes
    fetch_s: float
    load_s: float
    waited_s: float
    load_parts: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., engine_hash: _Optional[bytes] = ..., fetch_s: _Optional[float] = ..., load_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., load_parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WeightsFailed(_message.Message):
    __slots__ = ("version", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    error: str
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class WeightsStalled(_message.Message):
    __slots__ = ("version", "address")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    address: str
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GeneratorCommand(_message.Message):
    __slots__ = ("welcome", "issue", "cancel", "weights", "idle", "drain", "stop", "queue", "pause")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ISSUE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    welcome: GeneratorWelcome
    issue: IssueBatch
    cancel: CancelBatch
    weights: WeightsAvailable
    idle: Idle
    drain: Drain
    stop: Stop
    queue: QueueState
    pause: Pause
    def __init__(self, welcome: _Optional[_Union[GeneratorWelcome, _Mapping]] = ..., issue: _Optional[_Union[IssueBatch, _Mapping]] = ..., cancel: _Optional[_Union[CancelBatch, _Mapping]] = ..., weights: _Optional[_Union[WeightsAvailable, _Mapping]] = ..., idle: _Optional[_Union[Idle, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., queue: _Optional[_Union[QueueState, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class GeneratorWelcome(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class IssueBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ...) -> None: ...

class CancelBatch(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightsAvailable(_message.Message):
    __slots__ = ("version", "address", "peer")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    address: str
    peer: bool
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., address: _Optional[str] = ..., peer: _Optional[bool] = ...) -> None: ...

class Idle(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class QueueState(_message.Message):
    __slots__ = ("waiting",)
    WAITING_FIELD_NUMBER: _ClassVar[int]
    waiting: bool
    def __init__(self, waiting: _Optional[bool] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    def __init__(self, paused: _Optional[bool] = ...) -> None: ...

class TrainerEvent(_message.Message):
    __slots__ = ("hello", "credit", "step_done", "published", "sync_journal", "checkpointed", "heartbeat", "waits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    SYNC_JOURNAL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    hello: TrainerHello
    credit: Credit
    step_done: StepDone
    published: Published
    sync_journal: SyncJournal
    checkpointed: Checkpointed
    heartbeat: TrainerHeartbeat
    waits: TrainerWaits
    def __init__(self, hello: _Optional[_Union[TrainerHello, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., step_done: _Optional[_Union[StepDone, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., sync_journal: _Optional[_Union[SyncJournal, _Mapping]] = ..., checkpointed: _Optional[_Union[Checkpointed, _Mapping]] = ..., heartbeat: _Optional[_Union[TrainerHeartbeat, _Mapping]] = ..., waits: _Optional[_Union[TrainerWaits, _Mapping]] = ...) -> None: ...

class TrainerHello(_message.Message):
    __slots__ = ("trainer_id", "instance", "step", "held_groups", "unrecorded_step", "weights_address", "checkpoint_step")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNRECORDED_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    instance: str
    step: int
    held_groups: _containers.RepeatedScalarFieldContainer[int]
    unrecorded_step: StepDone
    weights_address: str
    checkpoint_step: int
    def __init__(self, trainer_id: _Optional[str] = ..., instance: _Optional[str] = ..., step: _Optional[int] = ..., held_groups: _Optional[_Iterable[int]] = ..., unrecorded_step: _Optional[_Union[StepDone, _Mapping]] = ..., weights_address: _Optional[str] = ..., checkpoint_step: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("step", "group_ids", "metrics", "advantages", "version_hash", "micro_steps", "states", "cuts")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_HASH_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    group_ids: _containers.RepeatedScalarFieldContainer[int]
    metrics: _containers.ScalarMap[str, float]
    advantages: bytes
    version_hash: bytes
    micro_steps: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedCompositeFieldContainer[TurnState]
    cuts: PassCuts
    def __init__(self, step: _Optional[int] = ..., group_ids: _Optional[_Iterable[int]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., advantages: _Optional[bytes] = ..., version_hash: _Optional[bytes] = ..., micro_steps: _Optional[_Iterable[int]] = ..., states: _Optional[_Iterable[_Union[TurnState, _Mapping]]] = ..., cuts: _Optional[_Union[PassCuts, _Mapping]] = ...) -> None: ...

class PassCuts(_message.Message):
    __slots__ = ("room_tokens", "halved")
    ROOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HALVED_FIELD_NUMBER: _ClassVar[int]
    room_tokens: int
    halved: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, room_tokens: _Optional[int] = ..., halved: _Optional[_Iterable[int]] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("version", "size_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: VersionName
    size_bytes: int
    def __init__(self, version: _Optional[_Union[VersionName, _Mapping]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SyncJournal(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Checkpointed(_message.Message):
    __slots__ = ("step", "path", "exported", "oldest_step")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    exported: bool
    oldest_step: int
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., exported: _Optional[bool] = ..., oldest_step: _Optional[int] = ...) -> None: ...

class TrainerWaits(_message.Message):
    __slots__ = ("step", "groups")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups: int
    def __init__(self, step: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class TrainerHeartbeat(_message.Message):
    __slots__ = ("bubble_seconds", "wall_seconds")
    class BubbleSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BUBBLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    bubble_seconds: _containers.ScalarMap[str, float]
    wall_seconds: float
    def __init__(self, bubble_seconds: _Optional[_Mapping[str, float]] = ..., wall_seconds: _Optional[float] = ...) -> None: ...

class TrainerCommand(_message.Message):
    __slots__ = ("welcome", "group", "step_recorded", "journal_synced", "idle", "stop", "restart", "held_out")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STEP_RECORDED_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_SYNCED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    welcome: TrainerWelcome
    group: Group
    step_recorded: StepRecorded
    journal_synced: JournalSynced
    idle: Idle
    stop: Stop
    restart: Restart
    held_out: HeldOut
    def __init__(self, welcome: _Optional[_Union[TrainerWelcome, _Mapping]] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., step_recorded: _Optional[_Union[StepRecorded, _Mapping]] = ..., journal_synced: _Optional[_Union[JournalSynced, _Mapping]] = ..., idle: _Optional[_Union[Idle, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ..., held_out: _Optional[_Union[HeldOut, _Mapping]] = ...) -> None: ...

class TrainerWelcome(_message.Message):
    __slots__ = ("attempt", "batch_groups", "lease_seconds", "held_out_samples", "cuts")
    class CutsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: PassCuts
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[PassCuts, _Mapping]] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BATCH_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    batch_groups: int
    lease_seconds: float
    held_out_samples: int
    cuts: _containers.MessageMap[int, PassCuts]
    def __init__(self, attempt: _Optional[int] = ..., batch_groups: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., held_out_samples: _Optional[int] = ..., cuts: _Optional[_Mapping[int, PassCuts]] = ...) -> None: ...

class HeldOut(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "step", "samples", "size_bytes", "more")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    step: int
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    size_bytes: int
    more: bool
    def __init__(self, group_id: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., size_bytes: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class StepRecorded(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class JournalSynced(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AgentsEvent(_message.Message):
    __slots__ = ("hello", "answer", "leaving", "started", "silences")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SILENCES_FIELD_NUMBER: _ClassVar[int]
    hello: AgentsHello
    answer: AgentsAnswer
    leaving: Leaving
    started: AgentsStarted
    silences: ProcessSilences
    def __init__(self, hello: _Optional[_Union[AgentsHello, _Mapping]] = ..., answer: _Optional[_Union[AgentsAnswer, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., started: _Optional[_Union[AgentsStarted, _Mapping]] = ..., silences: _Optional[_Union[ProcessSilences, _Mapping]] = ...) -> None: ...

class AgentsHello(_message.Message):
    __slots__ = ("host_id", "instance")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    instance: str
    def __init__(self, host_id: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class AgentsCommand(_message.Message):
    __slots__ = ("welcome", "request", "stop")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    welcome: AgentsWelcome
    request: AgentsRequest
    stop: Stop
    def __init__(self, welcome: _Optional[_Union[AgentsWelcome, _Mapping]] = ..., request: _Optional[_Union[AgentsRequest, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class AgentsWelcome(_message.Message):
    __slots__ = ("life",)
    LIFE_FIELD_NUMBER: _ClassVar[int]
    life: str
    def __init__(self, life: _Optional[str] = ...) -> None: ...

class AgentsRequest(_message.Message):
    __slots__ = ("number", "request", "item")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: bytes
    item: str
    def __init__(self, number: _Optional[int] = ..., request: _Optional[bytes] = ..., item: _Optional[str] = ...) -> None: ...

class AgentsStarted(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ProcessSilences(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[str]] = ...) -> None: ...

class AgentsAnswer(_message.Message):
    __slots__ = ("number", "row")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    number: int
    row: bytes
    def __init__(self, number: _Optional[int] = ..., row: _Optional[bytes] = ...) -> None: ...

class GroupTexts(_message.Message):
    __slots__ = ("prompt", "samples", "answer", "metadata")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleTexts]
    answer: str
    metadata: str
    def __init__(self, prompt: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleTexts, _Mapping]]] = ..., answer: _Optional[str] = ..., metadata: _Optional[str] = ...) -> None: ...

class SampleTexts(_message.Message):
    __slots__ = ("turns", "observations", "contexts")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedScalarFieldContainer[str]
    observations: _containers.RepeatedScalarFieldContainer[str]
    contexts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, turns: _Optional[_Iterable[str]] = ..., observations: _Optional[_Iterable[str]] = ..., contexts: _Optional[_Iterable[int]] = ...) -> None: ...

class ArchivedGroup(_message.Message):
    __slots__ = ("group_id", "prompt_index", "start_version", "step", "attempt", "drop_reason", "advantages", "samples", "position", "micro_step", "version_hash", "cuts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DROP_REASON_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_HASH_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    prompt_index: int
    start_version: int
    step: int
    attempt: int
    drop_reason: str
    advantages: bytes
    samples: _containers.RepeatedCompositeFieldContainer[ArchivedSample]
    position: int
    micro_step: int
    version_hash: bytes
    cuts: PassCuts
    def __init__(self, group_id: _Optional[int] = ..., prompt_index: _Optional[int] = ..., start_version: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., drop_reason: _Optional[str] = ..., advantages: _Optional[bytes] = ..., samples: _Optional[_Iterable[_Union[ArchivedSample, _Mapping]]] = ..., position: _Optional[int] = ..., micro_step: _Optional[int] = ..., version_hash: _Optional[bytes] = ..., cuts: _Optional[_Union[PassCuts, _Mapping]] = ...) -> None: ...

class ArchivedSample(_message.Message):
    __slots__ = ("reward", "tokens", "failed")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reward: float
    tokens: int
    failed: bool
    def __init__(self, reward: _Optional[float] = ..., tokens: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class ArchivedSamples(_message.Message):
    __slots__ = ("samples", "texts")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    texts: GroupTexts
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., texts: _Optional[_Union[GroupTexts, _Mapping]] = ...) -> None: ...
