"""Which pairs are learnt when: rounds of tuning, mini-batch by mini-batch.

A round begins when there are `refit_pairs` pairs that were never learnt. It takes them (where tuning cannot keep up, the newest twice so many;
the others are old from then on) and as many old ones, drawn at random: with new ones alone a model forgets. Between two mini-batches the caller
decides when the next may run; scores are asked in between, of the model as it then is. Owns rounds; not the budget, not the model.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Protocol

from streamrl_workers.ranker.pairs import Pair, PairStore, standardised

PASSES = 2
"""Over the pairs of a round; each is also drawn again as an old one."""
BATCH_PROMPTS = 8
"""Few, so that a mini-batch is short: scores wait for its end."""
MOST_NEW = 2
"""Times `refit_pairs`."""


class Tunable(Protocol):
    """What is tuned."""

    def tuning(
        self, examples: Sequence[tuple[str, float]], *, passes: int, batch_prompts: int, seed: int
    ) -> Iterator[None]:
        """Learn (prompt, target); yields after each mini-batch, scores may be asked then."""


class Tuner:
    """Rounds over the pairs of a store."""

    def __init__(
        self, model: Tunable, *, store: PairStore, refit_pairs: int, rounds: int, save: Callable[[int], None]
    ) -> None:
        """`rounds`: done before; `save` is called with their number after each."""
        self._model = model
        self._store = store
        self._refit_pairs = refit_pairs
        self._save = save
        self._round: Iterator[None] | None = None
        self.rounds = rounds

    @property
    def due(self) -> bool:
        """Whether there is a mini-batch to run."""
        return self._round is not None or len(self._store.new()) >= self._refit_pairs

    def step(self) -> None:
        """Run one mini-batch; behind the last one of a round, save."""
        assert self.due
        if self._round is None:
            self._begin()
        assert self._round is not None
        if next(self._round, _END) is _END:
            self._round = None
            self.rounds += 1
            self._save(self.rounds)
            self._store.write()

    def _begin(self) -> None:
        new, old = self._store.new(), self._store.old()
        for pair, target in zip(new, standardised([pair.tokens for pair in new]), strict=True):
            pair.target = target
        new = new[-MOST_NEW * self._refit_pairs :]
        draw = Random(self.rounds)
        chosen: list[Pair] = new + draw.sample(old, min(len(new), len(old)))
        examples = [(pair.prompt, pair.target) for pair in chosen if pair.target is not None]
        self._round = self._model.tuning(examples, passes=PASSES, batch_prompts=BATCH_PROMPTS, seed=self.rounds)


_END = object()
