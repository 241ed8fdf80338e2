"""The life of a request in an engine that works on tokens: from its text to a sequence, from new tokens to deltas.

Owns: which requests are refused, where a completion ends, its text. Does not own the model, slots, versions.
Shared by the engines `hf` and `vllm`. Knows no torch.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import MARK
from streamrl_workers.answer_marks import AnswerText
from streamrl_workers.generator.engines.base import Delta, FinishReason
from streamrl_workers.stream.literals import Literals
from streamrl_workers.stream.packing import unpack_int32


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveSequence:
    """A request in a slot."""

    request: pb.SampleRequest
    prompt: tuple[int, ...]
    completion: list[int]  # prefix and observation included
    limit: int  # tokens of the completion at most, context included
    stop: tuple[str, ...] = ()  # strings of the request, read once: they are asked for at each token
    context: int = 0  # of the completion's tokens, those before the turn under way
    observed: tuple[int, ...] = ()  # the end of the context, where this request brought it as text
    reported: bool = False  # its first delta is out
    replayed: int = 0  # of its last tokens, those that engine `hf` has yet to feed again
    lease: int = field(init=False)  # of the request, read once

    def __post_init__(self) -> None:
        self.lease = self.request.lease

    @property
    def turn(self) -> list[int]:
        """The completion without its context."""
        return self.completion[self.context :]

    @property
    def given(self) -> list[int]:
        """What the turn under way began with."""
        return [*self.prompt, *self.completion[: self.context]]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.completion]


_MAX_PROMPTS = 256
"""Prompts that are kept at most, as tokens and as keys and values."""


class PromptTokens:
    """Tokenizes, and remembers the last prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True) -> None:
        """`add_special_tokens` False: prompts come from a chat template, which has put them in."""
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._kept = functools.lru_cache(maxsize=_MAX_PROMPTS)(self._tokens)

    def of(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens, with the special tokens that the tokenizer adds, if so asked."""
        return self._kept(prompt)

    def behind(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that follows other tokens: no special ones are added."""
        return self._encoded(text, special=False) if text else ()

    def _tokens(self, prompt: str) -> tuple[int, ...]:
        return self._encoded(prompt, special=self._add_special_tokens)

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        if MARK in text and not self._add_special_tokens:
            return self._literals.tokens(text)
        return tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    @functools.cached_property
    def _literals(self) -> Literals:
        return Literals(self._tokenizer.backend_tokenizer)


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a token decodes to that holds part of a character: it may complete any."""

_WINDOW_TOKENS_PER_CHAR = 4
"""A character takes at most so many tokens (the bytes of UTF-8)."""

_WINDOW_SLACK_TOKENS = 8
"""More, for special tokens in between, which may have no text."""


class Stopping:
    """Decides whether the newest token ended a completion. Stop strings are looked for in its text with and without special tokens."""

    def __init__(self, *, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self._texts = AnswerText(tokenizer, ends=end_ids)
        self._end_ids = end_ids
        self._last_chars: dict[tuple[str, ...], dict[int, bool]] = {}  # by stop strings, by token

    def reason(self, seq: ActiveSequence) -> FinishReason | None:
        """Why the completion has ended with its newest token; None if it has not."""
        token = seq.completion[-1]
        if token in self._end_ids:
            return "stop"
        if seq.stop and self._may_complete(token, stop=seq.stop) and self._completes(seq.turn, stop=seq.stop):
            return "stop"
        return "length" if len(seq.completion) >= seq.limit else None

    def text(self, seq: ActiveSequence) -> str:
        """The text of the completion (without its context), without hidden tokens, cut before the first stop string."""
        stops, text = seq.stop, self._texts.of(seq.turn)
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        if stops and not ends:
            whole = self._texts.whole(seq.turn)
            plain = [self._without_hidden(stop) for stop in stops if stop in whole]
            ends = [place for one in plain if (place := text.rfind(one)) >= 0]  # the newest token holds the stop's end
        return text[: min(ends)] if ends else text

    def _completes(self, completion: list[int], *, stop: tuple[str, ...]) -> bool:
        """Look at the end first: decoding the whole completion at every candidate would be quadratic."""
        longest = max(len(string) for string in stop)
        tail = completion[-(longest * _WINDOW_TOKENS_PER_CHAR + _WINDOW_SLACK_TOKENS) :]
        return self._holds(tail, stop=stop) and self._holds(completion, stop=stop)

    def _holds(self, tokens: list[int], *, stop: tuple[str, ...]) -> bool:
        texts = [self._texts.of(tokens), self._texts.whole(tokens)]
        return any(string in text for string in stop for text in texts)

    def _may_complete(self, token: int, *, stop: tuple[str, ...]) -> bool:
        """Whether the token holds the last character of a stop string. Remembered, as decoding is slow."""
        known = self._last_chars.setdefault(stop, {})
        if token not in known:
            # Twice: some tokenizers drop the space before the first token.
            text = self._texts.whole([token, token])
            known[token] = _REPLACEMENT in text or any(string[-1] in text for string in stop)
        return known[token]

    def _without_hidden(self, text: str) -> str:
        return functools.reduce(lambda left, token: left.replace(token, ""), self._texts.hidden, text)


class Requests:
    """Admits requests and says what each step gave them."""

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        limit_tokens: int,
        vocabulary: int,
        add_special_tokens: bool,
        capacity_tokens: int | None = None,
    ) -> None:
        """`limit_tokens`: prompt and completion together. `vocabulary`: rows of the model's embedding.

        `capacity_tokens`: whose keys and values fit; None: at least `limit_tokens`. A first turn that might need more is refused,
        later ones end there as they do at the limit.
        """
        self.end_ids = end_ids
        self._limit_tokens = limit_tokens
        self._capacity_tokens = limit_tokens if capacity_tokens is None else min(limit_tokens, capacity_tokens)
        self._vocabulary = vocabulary
        self._prompts = PromptTokens(tokenizer, add_special_tokens=add_special_tokens)
        self._stopping = Stopping(tokenizer=tokenizer, end_ids=end_ids)

    def admit(self, request: pb.SampleRequest, *, version: int) -> ActiveSequence | Delta:
        """A sequence to put into a slot, or the last delta of a request that needs none."""
        what = "prompt"
        try:
            prompt = self._prompts.of(request.prompt)
            what = "observation"
            observed = self._prompts.behind(request.observation)
        except Exception as error:  # noqa: BLE001 - the tokenizers' Rust raises a bare one, as for a character that it does not know
            seq = ActiveSequence(request=request, prompt=(), completion=[], limit=0)
            return self.failed(seq, f"the {what} cannot be tokenized: {error}", version=version)
        context = request.context_tokens + len(observed)
        has_turns = request.has_turns or context > 0
        room = self._capacity_tokens if has_turns else self._limit_tokens
        seq = ActiveSequence(
            request=request,
            prompt=prompt,
            completion=[*unpack_int32(request.prefix_tokens), *observed],
            limit=min(context + request.sampling.max_tokens, room - len(prompt)),
            stop=tuple(request.sampling.stop),
            context=context,
            observed=observed,
        )
        refusal = self._refusal(seq, has_turns=has_turns)
        if refusal is not None:
            return self.failed(seq, refusal, version=version)
        if seq.limit <= context:  # earlier turns, or a later context's prompt, have taken all positions
            return self._delta(seq, version=version, reason="length")
        reason = self._stopping.reason(seq) if seq.turn else None
        return seq if reason is None else self._delta(seq, version=version, reason=reason)

    def extend(self, seq: ActiveSequence, *, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> Delta:
        """Return what new tokens mean for a sequence; those after its end are dropped."""
        completion = seq.completion
        if (
            seq.reported
            and not seq.stop
            and len(completion) + len(tokens) < seq.limit
            and self.end_ids.isdisjoint(tokens)
            and all(map(math.isfinite, logprobs))
        ):  # nearly all: the rest below costs several times as much
            completion += tokens
            return Delta(seq.lease, tuple(tokens), tuple(logprobs), version)
        reason = None
        for taken, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            if not math.isfinite(logprob):
                error = f"the model gave a log-prob of {logprob} under weights of version {version}"
                return self.failed(seq, error, version=version)
            completion.append(token)
            reason = self._stopping.reason(seq)
            if reason is not None:
                tokens, logprobs = tokens[:taken], logprobs[:taken]
                break
        return self._delta(seq, version=version, tokens=tuple(tokens), logprobs=tuple(logprobs), reason=reason)

    def failed(self, seq: ActiveSequence, error: str, *, version: int) -> Delta:
        """The last delta of a request that cannot go on."""
        return self._delta(seq, version=version, reason="error", error=error)

    def _refusal(self, seq: ActiveSequence, *, has_turns: bool) -> str | None:
        """Why a sequence cannot be generated."""
        if not seq.prompt:
            return "the prompt has no tokens"
        if seq.limit <= 0 and not has_turns:
            return f"the prompt has {len(seq.prompt)} tokens; prompt and completion have room for {self._limit_tokens}"
        if not has_turns and len(seq.prompt) + seq.limit > self._capacity_tokens:
            return (
                f"prompt and completion may have {len(seq.prompt)} + {seq.limit} tokens, and keys and values of "
                f"{self._capacity_tokens} fit: raise kvCacheBytes or lower maxTokens"
            )
        strange = [token for token in seq.tokens if not 0 <= token < self._vocabulary]
        if strange:
            return f"token {strange[0]} is not in the model's vocabulary of {self._vocabulary}"
        return None

    def _delta(
        self,
        seq: ActiveSequence,
        *,
        version: int,
        reason: FinishReason | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        error: str | None = None,
    ) -> Delta:
        prompt_tokens = None if seq.reported else seq.prompt
        observation_tokens = seq.observed if tokens and not seq.reported else ()
        seq.reported = True
        return Delta(
            lease=seq.lease,
            tokens=tokens,
            logprobs=logprobs,
            version=version,
            finish_reason=reason,
            text=None if reason is None else self._stopping.text(seq),
            prompt_tokens=prompt_tokens,
            error=error,
            observation_tokens=observation_tokens,
        )


def limit_tokens(config: PreTrainedConfig) -> int:
    """Prompt and completion together: what a model has positions for. Raises ValueError where its configuration does not say."""
    positions: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        raise ValueError(f"model_type {config.model_type!r} names no max_position_embeddings")
    return positions
