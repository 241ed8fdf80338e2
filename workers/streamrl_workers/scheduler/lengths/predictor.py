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

A ranker in another process (`RemoteRanker`) is asked as soon as a prompt is there (`expect`, `take_questions`), a batch or two before its
group begins to wait, and answers later (`ranked`). An answer that comes behind that is too late for the group.

Everything is bounded: the windows, the predictions kept for groups that live, the history.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamrl_workers.scheduler.lengths.history import LengthHistory
from streamrl_workers.scheduler.lengths.quantiles import UNKNOWN_PLACE, SlidingQuantiles
from streamrl_workers.scheduler.lengths.ranker import Ranker, RemoteRanker
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
"""Predictions kept for groups that live; far above what admission lets live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one completion."""

    tokens: float
    """The recent completions' quantile at `share` (of Siblings what they say themselves); 0 while none has finished."""
    source: Source
    share: float = UNKNOWN_PLACE
    """Place in the length distribution, 0..1: 0.9 = longer than 90 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsView:
    """What metrics read of the length signals."""

    trusted: bool = False
    """Whether dispatch may use predictions."""
    trusted_signals: frozenset[str] = frozenset()
    predictions: Mapping[str, int] = field(default_factory=dict)
    """Source -> groups that began with its prediction, since the start."""
    quality: Mapping[str, Quality] = field(default_factory=dict)
    """Of each signal that is judged and used by the job."""


@dataclass(slots=True)
class _Signal:
    """One judged signal."""

    source: Source
    score: Callable[[int, str], float | None]
    """(prompt key, prompt) -> score; None: the prompt is not known."""
    recent: SlidingQuantiles
    trust: Trust = field(default_factory=Trust)


_Places = tuple[tuple[Source, float], ...]
"""What each signal that knows a prompt says, in the ladder's order."""


class Lengths:
    """Predicts by the signals of the job, and learns from what becomes of the samples."""

    def __init__(self, history: LengthHistory, *, signals: Collection[str], ranker: Ranker | None = None) -> None:
        """`signals`: `scheduling.lengthSignals`, first one first; history is learnt all the same, and not used, without `History`.

        `ranker`: what the signal `Ranker` asks; without one that signal knows nothing.
        """
        self._history = history
        self._ranker = ranker
        self._remote = ranker if isinstance(ranker, RemoteRanker) else None
        self._uses_siblings = "Siblings" in signals
        newest = list(history.means().values())[-SCORES_WINDOW:]
        made = {
            "History": lambda: _Signal(
                "History", lambda key, _: history.known(key), SlidingQuantiles(newest, window=SCORES_WINDOW)
            ),
            "Ranker": lambda: _Signal("Ranker", self._ask_ranker, SlidingQuantiles(window=SCORES_WINDOW)),
        }
        self._ladder = [made[name]() for name in dict.fromkeys(signals) if name in made]
        self.completions = SlidingQuantiles(newest, window=COMPLETIONS_WINDOW)
        """Tokens of completions that have finished."""
        self._places: OrderedDict[int, _Places] = OrderedDict()
        """By prompt key, from its first prediction until a group of it has finished."""
        self._begun: OrderedDict[int, _Places] = OrderedDict()
        """By group, what is to be judged."""
        self._predictions: Counter[str] = Counter()
        self.trusted_signals: frozenset[str] = frozenset()
        """Which may decide; another value only when a look has ended otherwise."""

    @property
    def trusted(self) -> bool:
        """Whether predictions may decide anything: False until at least one signal has shown that it knows."""
        return bool(self.trusted_signals)

    @property
    def rank_correlation(self) -> float:
        """Lower limit of that of the worst trusted signal: any of them may have predicted a batch."""
        qualities = [signal.trust.quality for signal in self._ladder if signal.source in self.trusted_signals]
        limits = [limit for quality in qualities if (limit := quality.correlation_lower) is not None]
        return min(limits, default=UNMEASURED_CORRELATION)

    def predict(self, key: int, *, prompt: str = "", siblings: Sequence[int] = ()) -> Prediction:
        """For a completion of the prompt with this key (`prompt_key`).

        Asked again for a prompt whose groups have not finished, it answers from memory: the prompt is scored once.

        Args:
            key: of the prompt.
            prompt: its text, for a ranker.
            siblings: tokens of the group's completions that have finished.
        """
        source, share = self._choose(self._places_of(key, prompt))
        if siblings and self._uses_siblings:
            prior_tokens = self.completions.at(share)
            weight = SIBLINGS_PRIOR if prior_tokens > 0 else 0.0
            tokens = (weight * prior_tokens + sum(siblings)) / (weight + len(siblings))
            return Prediction(tokens=tokens, source="Siblings", share=self.completions.place(tokens))
        return Prediction(tokens=self.completions.at(share), source=source, share=share)

    def began(self, group_id: int, *, key: int, prompt: str = "") -> None:
        """The group begins to wait: what is predicted now orders the queue, and will be judged. Said again, nothing changes."""
        if group_id in self._begun:
            return
        places = self._places_of(key, prompt)
        self._begun[group_id] = places
        if len(self._begun) > MAX_GROUPS:
            self._begun.popitem(last=False)
        self._predictions[self._choose(places)[0]] += 1

    def learn(self, key: int, *, tokens: Sequence[int], prompt: str = "", group_id: int | None = None) -> None:
        """A group of this prompt is finished; `tokens` of each of its completions, at least one."""
        mean_tokens = sum(tokens) / len(tokens)
        judged = dict(self._begun.pop(group_id, ())) if group_id is not None else {}
        for signal in self._ladder:
            if signal.source in judged:
                signal.trust.add(judged[signal.source], tokens=mean_tokens)
                if signal.trust.trusted is not (signal.source in self.trusted_signals):
                    self.trusted_signals ^= {signal.source}
        for count in tokens:
            self.completions.add(count)
        self._history.learn(key, mean_tokens=mean_tokens)
        if self._ranker is not None and prompt:
            self._ranker.learn(prompt, mean_tokens)
        self._places.pop(key, None)

    def forget(self, group_id: int, *, key: int) -> None:
        """The group will not finish: its prediction is not judged, and the next group of its prompt is predicted anew."""
        self._begun.pop(group_id, None)
        self._places.pop(key, None)

    def view(self) -> LengthsView:
        """The signals in numbers."""
        return LengthsView(
            trusted=self.trusted,
            trusted_signals=self.trusted_signals,
            predictions=dict(self._predictions),
            quality={signal.source: signal.trust.quality for signal in self._ladder},
        )

    # ---- a ranker in another process

    def expect(self, prompt: str) -> None:
        """A group of this prompt is to come."""
        if self._remote is not None and prompt:
            self._remote.ask(prompt)

    def take_questions(self) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[str, float], ...]]:
        """What is to be asked since the last call: prompts by key, to score, and pairs (prompt, tokens), to learn."""
        return self._remote.take() if self._remote is not None else ((), ())

    def ranked(self, scores: Mapping[int, float]) -> None:
        """The ranker's answers by prompt key, for groups that begin to wait from now on."""
        assert self._remote is not None, "an answer of a ranker that is not asked"
        for key, score in scores.items():
            self._remote.told(key, score)

    # ---- inside

    def _ask_ranker(self, _key: int, prompt: str) -> float | None:
        return self._ranker.score(prompt) if self._ranker is not None and prompt else None

    def _places_of(self, key: int, prompt: str) -> _Places:
        """From memory, or made now."""
        found = self._places.get(key)
        if found is None:
            found = tuple(self._score(key, prompt))
            if prompt or self._ranker is None:
                self._places[key] = found
            if len(self._places) > MAX_GROUPS:
                self._places.popitem(last=False)
        return found

    def _score(self, key: int, prompt: str) -> list[tuple[Source, float]]:
        places: list[tuple[Source, float]] = []
        for signal in self._ladder:
            score = signal.score(key, prompt)
            if score is not None:
                signal.recent.add(score)
                places.append((signal.source, signal.recent.place(score)))
        return places

    def _choose(self, places: _Places) -> tuple[Source, float]:
        """The first signal that knows and, once any is trusted, is trusted."""
        trusted = self.trusted_signals
        usable = (place for place in places if not trusted or place[0] in trusted)
        return next(usable, ("Nothing", UNKNOWN_PLACE))
