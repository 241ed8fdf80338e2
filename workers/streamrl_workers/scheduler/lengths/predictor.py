"""The ladder of length signals: the first one that knows a prompt predicts its completions.

    History    past lengths of the same prompt             a score: the moving mean, in tokens
    Siblings   finished completions of the same group      tokens, shrunk towards what was thought before
    Ranker     a learned function of the prompt            a score without a unit

Owns the order of the signals, the way from a score to tokens, and the judgement of each signal (`trust.py`).

A score is never believed as a number. It is turned into its place among the recent scores of the same
signal, and that into the empirical quantile of recent completions: only the ranks come from the signal.
So lengths that grow under training, and a ranker that is off by a factor, do no harm.

The prediction that a group gets when it begins to wait is the one that is judged, for each
signal that knew the prompt, used or not. As long as no signal is trusted, `trusted` is False and a
prediction is that of the first signal that knows; once one is, signals that are not trusted are passed over.

A ranker is a process of its own (`streamrl_workers/ranker`), so a model that takes long never holds up a decision. It is asked as soon as a
prompt is there (`expect`, `take_questions`), a batch or two before its group begins to wait, and answers later (`ranked`). Until then
nothing is known of the prompt. An answer that comes when the group waits is too late for it.

Everything is bounded: the windows, the predictions kept for groups that live, the history.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeVar

from streamrl_workers.scheduler.lengths.quantiles import UNKNOWN_PLACE, SlidingQuantiles
from streamrl_workers.scheduler.lengths.trust import Quality, Trust

Source = Literal["History", "Siblings", "Ranker", "Nothing"]
"""Which signal a prediction rests on."""
SOURCES: tuple[Source, ...] = ("History", "Siblings", "Ranker", "Nothing")
JUDGED: tuple[Source, ...] = ("History", "Ranker")
"""Signals that predict before a group begins: what they say orders the queue, so they are judged."""
COMPLETIONS_WINDOW = 4096
"""Finished completions that make the distribution of lengths: a few steps, so that it follows the policy."""
SCORES_WINDOW = 1024
"""Recent scores of a signal among which a new one has its place."""
SIBLINGS_PRIOR = 2.0
"""Samples that what was thought before counts as. One sibling says as much if lengths spread within a prompt as they do between
prompts; twice that since the first to finish are the short ones."""
UNMEASURED_CORRELATION = 0.5
"""Of predictions that are trusted and whose correlation nobody tells: about the least that passes."""
MAX_GROUPS = 65_536
"""Predictions kept for groups that live, and scores of a ranker; far above what admission lets live and what is looked ahead to."""
WEIGHT = 0.5
"""Weight of the newest group in the moving mean: the policy changes, old lengths mislead."""
MAX_PROMPTS = 65_536
"""About 10 MiB; an endless data set must not fill the memory."""


def prompt_key(text: str) -> int:
    """Stable 63-bit key of a prompt, never 0."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


class LengthHistory:
    """Past lengths by prompt: moving means of completion tokens.

    A prompt is known by a stable hash of its text: a data set that comes round again, a restart and two equal prompts find
    the same past. The prompts not seen for the longest time are forgotten.
    """

    def __init__(self, means: Mapping[int, float] | None = None, *, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._means: OrderedDict[int, float] = OrderedDict()
        for key, mean in (means or {}).items():
            self._put(key, mean)

    def learn(self, key: int, *, mean_tokens: float) -> None:
        """One more group of this prompt was `mean_tokens` long on average."""
        known = self._means.get(key)
        self._put(key, mean_tokens if known is None else known + WEIGHT * (mean_tokens - known))

    def known(self, key: int) -> float | None:
        """Expected completion tokens of this prompt; None of one never seen."""
        return self._means.get(key)

    def means(self) -> dict[int, float]:
        """Prompt key -> mean completion tokens, least recently seen first."""
        return dict(self._means)

    def _put(self, key: int, mean: float) -> None:
        self._means.pop(key, None)
        self._means[key] = mean
        if len(self._means) > self._max_prompts:
            self._means.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one completion."""

    tokens: float
    """The recent completions' quantile at `share` (of Siblings what they say themselves); 0 while none has finished."""
    source: Source
    share: float = UNKNOWN_PLACE
    """Place in the length distribution, 0..1: 0.9 = longer than 90 %."""


@dataclass(slots=True)
class _Signal:
    """One judged signal."""

    source: Source
    score: Callable[[int], float | None]
    """Prompt key -> score; None: the prompt is not known."""
    recent: SlidingQuantiles
    trust: Trust = field(default_factory=Trust)


_Places = tuple[tuple[Source, float], ...]
"""What each signal that knows a prompt says, in the ladder's order."""
_Kept = TypeVar("_Kept", _Places, float)


class Lengths:
    """Predicts by the signals of the job, and learns from what becomes of the samples."""

    def __init__(self, history: LengthHistory, *, signals: Collection[str]) -> None:
        """`signals`: `scheduling.lengthSignals`, first one first; history is learnt all the same, and not used, without `History`."""
        self._history = history
        self._scores: OrderedDict[int, float] = OrderedDict()
        """Prompt key -> the ranker's newest answer."""
        self._prompts: list[tuple[int, str]] = []
        self._pairs: list[tuple[str, float]] = []
        self._uses_siblings, self.asks = "Siblings" in signals, "Ranker" in signals
        newest = list(history.means().values())[-SCORES_WINDOW:]
        judged: dict[str, _Signal] = {
            "History": _Signal("History", history.known, SlidingQuantiles(newest, window=SCORES_WINDOW)),
            "Ranker": _Signal("Ranker", self._ranker_score, SlidingQuantiles(window=SCORES_WINDOW)),
        }
        self._ladder = [judged[name] for name in dict.fromkeys(signals) if name in judged]
        self.completions = SlidingQuantiles(newest, window=COMPLETIONS_WINDOW)
        """Tokens of completions that have finished."""
        self._places: OrderedDict[int, _Places] = OrderedDict()
        """By prompt key, from its first prediction until a group of it has finished."""
        self._begun: OrderedDict[int, _Places] = OrderedDict()
        """By group, what is to be judged."""
        self.predictions: Counter[str] = Counter()
        """Source -> groups that began with its prediction, since the start."""
        self.trusted = False
        """Whether predictions may decide anything: False until at least one signal has shown that it knows."""
        self.trusted_signals: frozenset[str] = frozenset()
        """Which may decide; another value only when a look has ended otherwise."""

    @property
    def rank_correlation(self) -> float:
        """Lower limit of that of the worst trusted signal: any of them may have predicted a batch."""
        qualities = [signal.trust.quality for signal in self._ladder if signal.source in self.trusted_signals]
        limits = [limit for quality in qualities if (limit := quality.correlation_lower) is not None]
        return min(limits, default=UNMEASURED_CORRELATION)

    @property
    def quality(self) -> dict[str, Quality]:
        """Of each signal that is judged and used by the job."""
        return {signal.source: signal.trust.quality for signal in self._ladder}

    def predict(self, key: int, *, siblings: Sequence[int] = ()) -> Prediction:
        """For a completion of the prompt with this key (`prompt_key`).

        Asked again for a prompt whose groups have not finished, it answers from memory.

        Args:
            key: of the prompt.
            siblings: tokens of the group's completions that have finished.
        """
        source, share = self._choose(self._places_of(key))
        if siblings and self._uses_siblings:
            prior_tokens = self.completions.at(share)
            weight = SIBLINGS_PRIOR if prior_tokens > 0 else 0.0
            tokens = (weight * prior_tokens + sum(siblings)) / (weight + len(siblings))
            return Prediction(tokens=tokens, source="Siblings", share=self.completions.place(tokens))
        return Prediction(tokens=self.completions.at(share), source=source, share=share)

    def began(self, group_id: int, *, key: int) -> None:
        """The group begins to wait: what is predicted now orders the queue, and will be judged. Said again, nothing changes."""
        if group_id in self._begun:
            return
        places = self._places_of(key)
        _keep(self._begun, group_id, places)
        self.predictions[self._choose(places)[0]] += 1

    def learn(self, key: int, *, tokens: Sequence[int], prompt: str = "", group_id: int | None = None) -> None:
        """A group of this prompt is finished; `tokens` of each of its completions, at least one."""
        mean_tokens = sum(tokens) / len(tokens)
        judged = dict(self._begun.pop(group_id, ())) if group_id is not None else {}
        for signal in self._ladder:
            if signal.source in judged:
                signal.trust.add(judged[signal.source], tokens=mean_tokens)
                if signal.trust.trusted is not (signal.source in self.trusted_signals):
                    self.trusted_signals ^= {signal.source}
                    self.trusted = bool(self.trusted_signals)
        for count in tokens:
            self.completions.add(count)
        self._history.learn(key, mean_tokens=mean_tokens)
        if self.asks and prompt:
            self._pairs.append((prompt, mean_tokens))
        self._places.pop(key, None)

    def forget(self, group_id: int, *, key: int) -> None:
        """The group will not finish: its prediction is not judged, and the next group of its prompt is predicted anew."""
        self._begun.pop(group_id, None)
        self._places.pop(key, None)

    # ---- the ranker

    def expect(self, prompt: str) -> None:
        """A group of this prompt is to come. It is scored also if an answer is known: that is of an older model."""
        if self.asks:
            self._prompts.append((prompt_key(prompt), prompt))

    def take_questions(self) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[str, float], ...]]:
        """What is to be asked since the last call: prompts by key, to score, and pairs (prompt, tokens), to learn."""
        prompts, pairs = tuple(self._prompts), tuple(self._pairs)
        self._prompts.clear()
        self._pairs.clear()
        return prompts, pairs

    def ranked(self, scores: Mapping[int, float]) -> None:
        """The ranker's answers by prompt key, for groups that begin to wait from now on. Only the order of scores counts: higher = longer."""
        for key, score in scores.items():
            _keep(self._scores, key, score)

    # ---- inside

    def _ranker_score(self, key: int) -> float | None:
        return self._scores.get(key)

    def _places_of(self, key: int) -> _Places:
        """From memory, or made now."""
        found = self._places.get(key)
        if found is None:
            found = tuple(self._score(key))
            _keep(self._places, key, found)
        return found

    def _score(self, key: int) -> list[tuple[Source, float]]:
        places: list[tuple[Source, float]] = []
        for signal in self._ladder:
            score = signal.score(key)
            if score is not None:
                signal.recent.add(score)
                places.append((signal.source, signal.recent.place(score)))
        return places

    def _choose(self, places: _Places) -> tuple[Source, float]:
        """The first signal that knows and, once any is trusted, is trusted."""
        trusted = self.trusted_signals
        usable = (place for place in places if not trusted or place[0] in trusted)
        return next(usable, ("Nothing", UNKNOWN_PLACE))


def _keep(kept: OrderedDict[int, _Kept], key: int, value: _Kept) -> None:
    """The newest value of this key; the oldest one of all leaves a full memory."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_GROUPS:
        kept.popitem(last=False)
