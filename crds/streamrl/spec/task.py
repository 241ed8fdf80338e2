"""What is learned: the data set, how answers are sampled, what they earn, how they are evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl import names
from streamrl.mixture import Mixture
from streamrl.spec.base import (
    NAME_PATTERN,
    ClusterName,
    FieldRule,
    OneOf,
    PythonFunction,
    SpecModel,
    Text,
    map_by,
)
from streamrl.spec.generators import Scaling
from streamrl.spec.pod import GeneratorPod
from streamrl.spec.tasks.datasets import Dataset
from streamrl.spec.tasks.rewards import Reward
from streamrl.spec.volumes import ObjectName

WHOLE_PERCENT = 100


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
    calls_in_thoughts: bool = Field(
        default=False, description="Tool calls within `<think>…</think>` are calls; false = they stay text."
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
MOST_TASKS = 16
MOST_WEIGHT = 1000
"""Of all tasks of a mixture together: so many prompts at most until its shares are exact."""

_AS_IN_TASK = Field(default=None, description="As in `task`.")


def _sum_percent(task: "Task | MixedTask") -> int:
    return sum(reward.weight_percent for reward in task.rewards)


def _few_tokens(turns: str, max_tokens: str) -> str:
    """Write that a sample is one message, in CEL."""
    return f"{turns}.maxTurns * ({max_tokens} + {turns}.maxObservationChars) <= {MAX_SAMPLE_TOKENS}"


def _tokens_rule(turns: str) -> FieldRule:
    return FieldRule(
        f"{turns}.maxTurns * (sampling.maxTokens + {turns}.maxObservationChars) must be at most {MAX_SAMPLE_TOKENS}",
        f"!has(self.{turns}) || {_few_tokens(f'self.{turns}', 'self.sampling.maxTokens')}",
        "{self.most_tokens}",
    )


class MixedTask(SpecModel):
    """A task of a mixture. What it does not name is one for all: temperature, group size, evaluation."""

    name: str = Field(description="Name in metrics.", pattern=NAME_PATTERN, min_length=1, max_length=32)
    weight: int = Field(
        default=1,
        ge=1,
        le=MOST_WEIGHT,
        description=f"Its prompts of as many as all weights add up to, at most {MOST_WEIGHT}.",
    )
    dataset: Dataset = Field(description="Where its prompts come from.")
    format: PythonFunction | None = _AS_IN_TASK
    chat: Chat | None = _AS_IN_TASK
    environment: EnvironmentSpec | None = _AS_IN_TASK
    rewards: tuple[Reward, ...] = Field(
        description="Parts of its reward.", min_length=1, max_length=16, json_schema_extra=map_by("name")
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Its longest completion (with an environment: turn) in tokens, at most `sampling.maxTokens`; absent = that.",
    )
    stop: tuple[Text, ...] | None = Field(
        default=None, max_length=16, description="Strings that end its completions; absent = those of `sampling`."
    )

    refused: ClassVar[Mapping[str, str]] = {
        "agent": "an agent is for a job of one task; use environment",
        "temperature": "the trainer computes log-probs at one temperature; set task.sampling.temperature",
        "sampling": "temperature, topP and topK are one for all tasks; set maxTokens or stop",
        "algorithm": "there is one loss; set spec.algorithm",
        "groupSize": "it is one for all tasks; set task.groupSize",
    }

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "weightPercent of rewards must sum to 100",
            f"self.rewards.map(r, r.weightPercent).sum() == {WHOLE_PERCENT}",
            _sum_percent,
        ),
        FieldRule(
            "reward environment needs environment",
            "has(self.environment) || self.rewards.all(r, !has(r.environment))",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTask:
    """A task of the mixture, or the only one of a job, with what it shares."""

    field: str
    """Path of its fields: `spec.task`, `spec.task.mixture[0]`."""
    name: str
    """Empty: the only one."""
    weight: int
    dataset: Dataset
    format: PythonFunction | None
    chat: Chat | None
    environment: EnvironmentSpec | None
    turns: EnvironmentSpec | AgentSpec | None
    """What answers the model's turns; None: a sample is one completion."""
    rewards: tuple[Reward, ...]
    sampling: Sampling
    held_out_split: str | None
    """Of a `huggingFace` data set."""

    @property
    def most_tokens(self) -> int:
        """Of a sample's turns, with what the model reads between them; 0 where it has one."""
        turns = self.turns
        return 0 if turns is None else turns.max_turns * (self.sampling.max_tokens + turns.max_observation_chars)


_OF_EACH = ("dataset", "format", "chat", "environment", "agent", "rewards")
"""Fields of a task that a mixture has in each of its own instead."""


class Task(SpecModel):
    """What is learned."""

    dataset: Dataset | None = Field(default=None, description="Where prompts come from; absent = `mixture`.")
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
    mixture: tuple[MixedTask, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_TASKS,
        json_schema_extra=map_by("name"),
        description="Several tasks in exact shares, each with a data set, rewards and the like of its own; absent = one task.",
    )
    group_size: int = Field(
        default=8, ge=1, le=1024, description="Completions of one prompt; 1 with algorithm `supervised` alone."
    )
    sampling: Sampling = Field(description="How completions are sampled.")
    rewards: tuple[Reward, ...] = Field(
        default=(),
        max_length=16,
        json_schema_extra=map_by("name"),
        description="Parts of the reward; empty = those of `mixture`, or none where there are no generators.",
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="Held-out evaluation.")
    allow_changed_data: bool = Field(
        default=False,
        description="Whether a run goes on with other data than its journal was written with; otherwise it waits until the data is back.",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Processes that make prompts and score completions; raise it where processes wait for `scoring`. "
        "Absent = one for each CPU, at least 4 and at most 8.",
    )

    @property
    def tasks(self) -> tuple[SingleTask, ...]:
        """Those of the mixture, or this one alone."""
        if not self.mixture:
            assert self.dataset is not None
            return (
                SingleTask(
                    field="spec.task",
                    name="",
                    weight=1,
                    dataset=self.dataset,
                    format=self.format,
                    chat=self.chat,
                    environment=self.environment,
                    turns=self.environment or self.agent,
                    rewards=self.rewards,
                    sampling=self.sampling,
                    held_out_split=self.evaluation.split,
                ),
            )
        return tuple(
            self._mixed(task, field=f"spec.task.mixture[{number}]") for number, task in enumerate(self.mixture)
        )

    def _mixed(self, task: MixedTask, *, field: str) -> SingleTask:
        own = {"max_tokens": task.max_tokens, "stop": task.stop}
        return SingleTask(
            field=field,
            name=task.name,
            weight=task.weight,
            dataset=task.dataset,
            format=task.format,
            chat=task.chat,
            environment=task.environment,
            turns=task.environment,
            rewards=task.rewards,
            sampling=self.sampling.model_copy(update={key: value for key, value in own.items() if value is not None}),
            held_out_split=self.evaluation.split if task.dataset.hugging_face is not None else None,
        )

    @property
    def shares(self) -> Mixture:
        """Which prompt is of which of `tasks`."""
        return Mixture([task.weight for task in self.tasks])

    @property
    def has_chat(self) -> bool:
        """Whether prompts are written by the tokenizer's chat template: all, or none."""
        return any(task.chat is not None for task in self.tasks)

    @property
    def has_turns(self) -> bool:
        """Whether samples of any task have several turns."""
        return any(task.turns is not None for task in self.tasks)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a sample of any task."""
        return max(task.most_tokens for task in self.tasks)

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "needs dataset, or mixture",
            "has(self.mixture) || has(self.dataset)",
        ),
        FieldRule(
            "each task of a mixture has its own: dataset, format, chat, environment, agent and rewards must be absent beside it",
            "!has(self.mixture) || !(has(self.dataset) || has(self.format) || has(self.chat) || "
            "has(self.environment) || has(self.agent) || self.rewards.size() > 0)",
            lambda task: ", ".join(name for name in _OF_EACH if getattr(task, name)),
        ),
        FieldRule(
            f"weights of mixture must sum to at most {MOST_WEIGHT}",
            f"!has(self.mixture) || self.mixture.map(t, t.weight).sum() <= {MOST_WEIGHT}",
            lambda task: sum(one.weight for one in task.mixture),
        ),
        FieldRule(
            "maxTokens of mixture must be at most sampling.maxTokens",
            "!has(self.mixture) || self.mixture.all(t, !has(t.maxTokens) || t.maxTokens <= self.sampling.maxTokens)",
            "{t.max_tokens} of {t.name}",
        ),
        FieldRule(
            "chat of mixture must be in all tasks, or in none",
            "!has(self.mixture) || self.mixture.all(t, has(t.chat)) || self.mixture.all(t, !has(t.chat))",
        ),
        FieldRule(
            "weightPercent of rewards must sum to 100",
            f"self.rewards.size() == 0 || self.rewards.map(r, r.weightPercent).sum() == {WHOLE_PERCENT}",
            _sum_percent,
        ),
        FieldRule(
            "reward environment needs task.environment or task.agent",
            "has(self.environment) || has(self.agent) || self.rewards.all(r, !has(r.environment))",
        ),
        FieldRule(
            "evaluation.split needs dataset.huggingFace",
            "!has(self.evaluation.split) || (has(self.dataset) && has(self.dataset.huggingFace)) || "
            "(has(self.mixture) && self.mixture.exists(t, has(t.dataset.huggingFace)))",
        ),
        _tokens_rule("environment"),
        _tokens_rule("agent"),
        FieldRule(
            f"environment.maxTurns * (maxTokens + environment.maxObservationChars) of mixture must be at most {MAX_SAMPLE_TOKENS}",
            "!has(self.mixture) || self.mixture.all(t, !has(t.environment) || "
            f"(has(t.maxTokens) && {_few_tokens('t.environment', 't.maxTokens')}) || "
            f"(!has(t.maxTokens) && {_few_tokens('t.environment', 'self.sampling.maxTokens')}))",
            "{self.most_tokens}",
        ),
        FieldRule(
            "needs at most one of environment, agent",
            "!(has(self.environment) && has(self.agent))",
        ),
        FieldRule(
            "agent writes the system turn itself: chat.systemPrompt must be absent",
            "!has(self.agent) || !has(self.chat) || !has(self.chat.systemPrompt)",
        ),
    )
