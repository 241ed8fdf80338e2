"""What an answer earns: the members of `task.rewards`."""

from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from streamrl.spec.base import NAME_PATTERN, OneOf, PythonFunction, SpecModel, Text

VARIABLE_PATTERN = r"^REWARD_TOKEN(_[A-Z0-9_]+)?$"
"""A job file may come from somebody else: it cannot name just any secret of the environment for just any address."""

COMPLETION_PATTERN = r"\{completion\}"
"""A judge that is not shown the completion gives all samples of a group the same."""


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
        pattern=COMPLETION_PATTERN,
        max_length=16384,
        description="The user's message. `{prompt}`, `{completion}` and `{answer}` stand for the sample's own; the answer is the reference, empty where there is none.",
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
        description="Most samples that are sent in the whole run, evaluations included; then the run ends. Further tries are not counted. With several such rewards in a task the least of them counts. Samples of other tasks of a mixture are not counted. Absent = no limit.",
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

    @property
    def host(self) -> str | None:
        """Host of the address; None: it has none, or one or a port that no resolver takes."""
        try:
            parts = urlsplit(self.url)
            named = (parts.hostname or "").encode("idna"), parts.port
        except ValueError:
            return None
        return parts.hostname if named[0] else None

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
