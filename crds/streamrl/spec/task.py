"""What is learned: the data set, how answers are sampled, what they earn, how they are evaluated."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl import names
from streamrl.spec.base import NAME_PATTERN, ClusterName, FieldRule, OneOf, PythonFunction, SpecModel, map_by, repeated
from streamrl.spec.generators import Scaling
from streamrl.spec.pod import GeneratorPod
from streamrl.spec.volumes import ObjectName

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]

VARIABLE_PATTERN = r"^REWARD_TOKEN(_[A-Z0-9_]+)?$"
"""A job file may come from somebody else: it cannot name just any secret of the environment for just any address."""
WHOLE_PERCENT = 100


class ReasoningGymDataset(SpecModel):
    """A procedural data set of reasoning-gym: endless prompts with a verifier of its own."""

    name: str = Field(description="Name of the data set: `chain_sum`.", min_length=1, max_length=128)
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        max_length=64,
        description="Parameters of the data set, as reasoning-gym names them (not `seed`, not `size`).",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class JsonlDataset(SpecModel):
    """One JSON object a line."""

    path: str = Field(
        description="File, relative to the job file; or its URL: `s3://bucket/file`.", min_length=1, max_length=1024
    )
    prompt_field: str = Field(default="prompt", description="Field of the prompt.", min_length=1, max_length=128)
    answer_field: str = Field(
        default="answer", description="Field of the reference answer.", min_length=1, max_length=128
    )
    held_out_percent: int = Field(
        default=10, ge=1, le=90, description="Share of the lines kept for evaluation, in percent."
    )


class HuggingFaceDataset(SpecModel):
    """A data set of the Hugging Face `datasets` library, of the hub or on disk."""

    name: str | None = Field(default=None, min_length=1, max_length=253, description="Name on the hub: `openai/gsm8k`.")
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Directory as `save_to_disk` writes it, or with parquet, JSON or CSV files; relative to the job file.",
    )
    config: str | None = Field(default=None, min_length=1, max_length=128, description="Configuration of the data set.")
    revision: str | None = Field(default=None, min_length=1, max_length=128, description="Branch, tag or commit.")
    split: str = Field(default="train", description="Split of the training prompts.", min_length=1, max_length=128)
    prompt_field: str = Field(default="prompt", description="Field of the prompt.", min_length=1, max_length=128)
    answer_field: str | None = Field(
        default=None, min_length=1, max_length=128, description="Field of the reference answer; absent = there is none."
    )
    held_out_percent: int = Field(
        default=10,
        ge=1,
        le=90,
        description="Share of the rows kept for evaluation, in percent, if `evaluation.split` names no split.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "needs exactly one of name, path",
            "has(self.name) != has(self.path)",
            lambda data: (data.name is None) == (data.path is None) and ("both" if data.name else "none"),
        ),
    )


class Dataset(OneOf):
    """Where prompts come from."""

    reasoning_gym: ReasoningGymDataset | None = Field(default=None, description="A procedural data set.")
    jsonl: JsonlDataset | None = Field(default=None, description="A file of prompts.")
    hugging_face: HuggingFaceDataset | None = Field(default=None, description="A data set of the hub or on disk.")


class Chat(SpecModel):
    """Prompts become the user's turn of a conversation, by the tokenizer's chat template."""

    system_prompt: str | None = Field(
        default=None, max_length=16_384, description="Text of the system turn; absent = none."
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        max_length=16,
        description="Further arguments of the template: `{enable_thinking: false}`.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


MAX_TURNS = Field(default=8, ge=1, le=256, description="Turns of the model, the last one included.")


class EnvironmentSpec(OneOf):
    """What answers the model's turns: a game, a tool, a simulator."""

    one_of: ClassVar[tuple[str, ...]] = ("python",)

    python: PythonFunction | None = Field(
        default=None, description="`f(*, question, answer, metadata, seed) -> environment` of the user's own."
    )
    max_turns: int = MAX_TURNS
    timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Longest time for one turn's answer, in seconds; then the sample counts as failed.",
    )
    max_observation_chars: int = Field(
        default=4096, ge=1, le=1_048_576, description="Longer answers of the environment are cut."
    )


CIDR_PATTERN = r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$"
Cidr = Annotated[str, StringConstraints(pattern=CIDR_PATTERN, max_length=64)]
Port = Annotated[int, Field(ge=1, le=65_535)]


class AgentEgress(SpecModel):
    """Addresses that programs may reach, as a NetworkPolicy's `ipBlock` has them."""

    cidr: Cidr = Field(description="Addresses: `10.0.0.0/16`; `0.0.0.0/0` is all, those of the cluster too.")
    except_: tuple[Cidr, ...] = Field(
        default=(), max_length=16, alias="except", description="Addresses of these that stay out of reach."
    )
    ports: tuple[Port, ...] = Field(default=(), max_length=16, description="TCP ports; none = all ports and protocols.")


class AgentPool(SpecModel):
    """Pods of their own for the programs, apart from trainer and generators."""

    scaling: Scaling = Field(
        default_factory=lambda: Scaling.model_validate({"static": {"replicas": 1}}),
        description="How many pods; each plays `sessions` samples at a time.",
    )
    egress: tuple[AgentEgress, ...] = Field(
        default=(), max_length=16, description="What the pods may reach beside the scheduler and names; none = nothing."
    )
    pod: GeneratorPod = Field(
        default=GeneratorPod(),
        description="Its pods on Kubernetes. `image` (absent = that of `tasks`), `env`, `resources` and mounts are of the container with the programs.",
    )

    name: ClassVar[str] = names.AGENTS
    cluster_name: ClassVar[ClusterName | None] = None
    """It is in the job's own cluster."""

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "pod.hostNetwork must be absent: no policy would keep programs from the network",
            "!self.pod.hostNetwork",
            lambda pool: pool.pod.host_network,
        ),
    )


class AgentSpec(SpecModel):
    """A program that asks the model through an OpenAI-compatible endpoint."""

    command: tuple[Text, ...] = Field(
        description="Program and arguments: `[python, agent.py]`; it runs beside the job file. The item is JSON on its standard input.",
        min_length=1,
        max_length=64,
    )
    max_turns: int = MAX_TURNS
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Longest time from its start, or from an answer of the model, to its next request or its end, in seconds; then the sample counts as failed.",
    )
    max_observation_chars: int = Field(
        default=16_384,
        ge=1,
        le=1_048_576,
        description="Requests that add more to the conversation are refused. A sample may be told `maxTurns` times as much.",
    )
    branches: Literal["Train", "Fail"] = Field(
        default="Train",
        description="What becomes of a sample whose program edits its history, or begins a second conversation: its turns are trained, each behind what the model had read, or it fails.",
    )
    sessions: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Samples at a time. One that waits for the model is ended where another needs its place, and is played again.",
    )
    sessions_per_program: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Samples that one program plays at a time: each item is a line of its standard input, with its key. Absent = a program plays one sample, and ends with it.",
    )
    pool: AgentPool | None = Field(
        default=None,
        description="Pods of their own for the programs, or as many processes of a local run; absent = the task pool starts them.",
    )


class Sampling(SpecModel):
    """How completions are sampled in training."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Softmax temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus: least set of tokens with this probability.")
    top_k: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Only the k most likely tokens; absent = all."
    )
    max_tokens: int = Field(
        description="Longest completion in tokens; with an environment: of one turn.", ge=1, le=1_048_576
    )
    stop: tuple[Text, ...] = Field(default=(), max_length=16, description="Strings that end a completion.")


class VerifierReward(SpecModel):
    """The data set's own verifier (reasoning-gym) or equality with the reference answer (JSONL)."""

    answer_pattern: Text | None = Field(
        default=None,
        description="Regular expression; its first group (or the whole match) of the last match is the answer. Absent = the whole completion.",
    )


class ExactMatchReward(SpecModel):
    """1 if the answer equals the reference after trimming, else 0."""

    answer_pattern: Text | None = Field(default=None, description="As in `verifier`.")
    ignore_case: bool = Field(default=False, description="Compare without regard to case.")


class RegexReward(SpecModel):
    """1 if the pattern is found in the completion, else 0."""

    pattern: Text = Field(description="Regular expression in Python's syntax.")


class MathVerifyReward(SpecModel):
    """1 if the completion's mathematical answer equals the reference (package math-verify), else 0."""


class JudgeChat(SpecModel):
    """What a model that judges is asked, and how its answer is read."""

    model: str = Field(description="Model's name, as its server has it.", min_length=1, max_length=256)
    prompt: str = Field(
        min_length=1,
        max_length=16384,
        description="The user's message. `{prompt}`, `{completion}` and `{answer}` stand for the sample's own; the answer is the reference.",
    )
    pattern: Text = Field(
        default=r"-?\d+(?:\.\d+)?",
        description="Regular expression; its first group (or the whole match) of the last match is the reward. Default: the last number. An answer without a number fails the sample.",
    )


class HttpReward(SpecModel):
    """Asks an endpoint: POST of `{prompt, completion, answer, metadata}` as JSON, answered by `{"reward": number}`; or a model that judges."""

    url: str = Field(description="Address of the endpoint.", pattern=r"^https?://[^\s]+$", max_length=2048)
    retries: int = Field(
        default=2, ge=0, le=10, description="Further tries after a refused connection or a status of 429 or 5xx."
    )
    concurrency: int = Field(
        default=32, ge=1, le=1024, description="Requests at once; with several such rewards the least of them counts."
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Most requests that begin in a minute, further tries included. Absent = no limit. Waiting for them is not counted in `timeoutSeconds`.",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Most samples that are sent in the whole run, evaluations included; then the run ends. Further tries are not counted. With several such rewards the least of them counts. Absent = no limit.",
    )
    chat: JudgeChat | None = Field(
        default=None,
        description="Ask as a chat completion: `url` is that of an OpenAI-compatible server, with `/chat/completions`. Absent = as JSON.",
    )
    token_variable: str | None = Field(
        default=None,
        pattern=VARIABLE_PATTERN,
        max_length=128,
        description="Environment variable whose value is sent as a bearer token: `REWARD_TOKEN` or `REWARD_TOKEN_NAME`; no other leaves the process. Absent = none.",
    )

    def most_at_once(self, timeout_s: float) -> int:
        """Requests of which each has its turn within half of its time; one, where turns are farther apart."""
        if self.requests_per_minute is None:
            return self.concurrency
        return min(self.concurrency, max(1, int(self.requests_per_minute / 60 * timeout_s / 2)))

    def longest_turn_s(self, timeout_s: float) -> float:
        """The longest wait for a turn, with so many at once."""
        return 0.0 if self.requests_per_minute is None else self.most_at_once(timeout_s) * 60 / self.requests_per_minute

    def longest_s(self, timeout_s: float) -> float:
        """Until a sample has its reward: all tries, and the wait for a turn before each."""
        return timeout_s + (self.retries + 1) * self.longest_turn_s(timeout_s)


class EnvironmentReward(SpecModel):
    """The sum of what the environment or the agent gave for the turns."""


class Reward(OneOf):
    """One part of the reward. The sample's reward is the weighted sum of the parts."""

    one_of: ClassVar[tuple[str, ...]] = (
        "verifier",
        "exact_match",
        "regex",
        "math_verify",
        "python",
        "http",
        "environment",
    )

    name: str = Field(description="Name in metrics.", pattern=NAME_PATTERN, min_length=1, max_length=32)
    weight_percent: int = Field(default=100, ge=1, le=100, description="Weight in percent; all weights sum to 100.")
    timeout_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="Longest time for one sample, in seconds; then it counts as failed."
    )
    verifier: VerifierReward | None = Field(default=None, description="The data set's own verifier.")
    exact_match: ExactMatchReward | None = Field(default=None, description="Equality with the reference answer.")
    regex: RegexReward | None = Field(default=None, description="A pattern that must occur.")
    math_verify: MathVerifyReward | None = Field(default=None, description="Equality of mathematical expressions.")
    python: PythonFunction | None = Field(
        default=None, description="`f(*, prompt, completion, answer, metadata) -> float` of the user's own."
    )
    http: HttpReward | None = Field(default=None, description="An endpoint that judges.")
    environment: EnvironmentReward | None = Field(
        default=None, description="What `task.environment` or `task.agent` gave."
    )


class Evaluation(SpecModel):
    """Greedy and sampled answers to held-out prompts, before the first step, every `intervalSteps`, and at the end."""

    split: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Split of a `huggingFace` data set; absent = a held-out share of the training split.",
    )
    max_prompts: int = Field(default=128, ge=1, le=100_000, description="Held-out prompts.")
    sampled_answers: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Answers to each prompt that are sampled as in training, beside the greedy one; their mean reward is told apart.",
    )
    interval_steps: int = Field(default=20, ge=1, le=1_000_000, description="Steps between evaluations.")


class Code(SpecModel):
    """The user's modules and data files on Kubernetes; a local run finds them beside the job file."""

    config_map_name: ObjectName = Field(
        description="ConfigMap in the job's namespace whose keys are the files, such as `rewards.py`."
    )


MAX_SAMPLE_TOKENS = 2**24
"""Of all turns: a sample goes to the trainer, and into the journal, as one message."""


class Task(SpecModel):
    """What is learned."""

    dataset: Dataset = Field(description="Where prompts come from.")
    format: PythonFunction | None = Field(
        default=None,
        description="`f(*, question, answer, metadata) -> {'prompt': str, 'target': str}`: how an item becomes a prompt and a warm-up text. Absent = the question and the answer.",
    )
    code: Code | None = Field(
        default=None,
        description="Modules that functions of this task are in, on Kubernetes; absent = the image has them.",
    )
    chat: Chat | None = Field(default=None, description="Use the tokenizer's chat template; absent = plain text.")
    environment: EnvironmentSpec | None = Field(
        default=None, description="Several turns with an environment; absent = one completion."
    )
    agent: AgentSpec | None = Field(
        default=None, description="Turns that a program of the user's asks for; absent = there is none."
    )
    group_size: int = Field(default=8, ge=2, le=1024, description="Completions of one prompt.")
    sampling: Sampling = Field(description="How completions are sampled.")
    rewards: tuple[Reward, ...] = Field(
        description="Parts of the reward.", min_length=1, max_length=16, json_schema_extra=map_by("name")
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="Held-out evaluation.")
    processes: int = Field(default=1, ge=1, le=256, description="Processes that make prompts and score completions.")

    @property
    def turns(self) -> EnvironmentSpec | AgentSpec | None:
        """What answers the model's turns; None: a sample is one completion."""
        return self.environment or self.agent

    @property
    def _most_sample_tokens(self) -> int:
        """Of all turns; 0 where a sample has one."""
        turns = self.turns
        return 0 if turns is None else turns.max_turns * (self.sampling.max_tokens + turns.max_observation_chars)

    @property
    def _too_many_tokens(self) -> int:
        """Of all turns; 0 where they are not too many."""
        return self._most_sample_tokens if self._most_sample_tokens > MAX_SAMPLE_TOKENS else 0

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "weightPercent of rewards must sum to 100",
            "self.rewards.map(r, r.weightPercent).sum() == 100",
            lambda task: (
                (total := sum(reward.weight_percent for reward in task.rewards)) != WHOLE_PERCENT and f"{total}"
            ),
        ),
        FieldRule(
            "names of rewards must differ",
            "self.rewards.all(r, self.rewards.exists_one(o, o.name == r.name))",
            lambda task: repeated(reward.name for reward in task.rewards),
        ),
        FieldRule(
            "reward environment needs task.environment or task.agent",
            "has(self.environment) || has(self.agent) || self.rewards.all(r, !has(r.environment))",
            lambda task: task.turns is None and any(reward.environment is not None for reward in task.rewards),
        ),
        FieldRule(
            "evaluation.split needs dataset.huggingFace",
            "!has(self.evaluation.split) || has(self.dataset.huggingFace)",
            lambda task: task.evaluation.split is not None and task.dataset.hugging_face is None,
        ),
        FieldRule(
            f"environment.maxTurns * (sampling.maxTokens + environment.maxObservationChars) must be at most {MAX_SAMPLE_TOKENS}",
            "!has(self.environment) || self.environment.maxTurns * "
            f"(self.sampling.maxTokens + self.environment.maxObservationChars) <= {MAX_SAMPLE_TOKENS}",
            lambda task: task.environment is not None and task._too_many_tokens,
        ),
        FieldRule(
            f"agent.maxTurns * (sampling.maxTokens + agent.maxObservationChars) must be at most {MAX_SAMPLE_TOKENS}",
            "!has(self.agent) || self.agent.maxTurns * "
            f"(self.sampling.maxTokens + self.agent.maxObservationChars) <= {MAX_SAMPLE_TOKENS}",
            lambda task: task.agent is not None and task._too_many_tokens,
        ),
        FieldRule(
            "needs at most one of environment, agent",
            "!(has(self.environment) && has(self.agent))",
            lambda task: task.environment is not None and task.agent is not None,
        ),
        FieldRule(
            "agent writes the system turn itself: chat.systemPrompt must be absent",
            "!has(self.agent) || !has(self.chat) || !has(self.chat.systemPrompt)",
            lambda task: task.agent is not None and task.chat is not None and task.chat.system_prompt is not None,
        ),
    )
