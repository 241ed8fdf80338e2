"""Which pairs the language model learns when, what that may cost, and what is kept of it.

A round of tuning begins when there are `refit_pairs` pairs that were never learnt. It takes them (where tuning cannot keep
up, the newest twice so many; the others are old from then on) and as many old ones, drawn at random: with new ones alone a
model forgets. Mini-batch by mini-batch: scores are asked in between, of the model as it then is. Behind a round the model is
kept in the run's folder as `model-<rounds>/`: written beside its place and renamed, so a killed process leaves the last whole one.

A mini-batch begins when CPU seconds of the process / wall seconds, both since the last one began, are at most the share: it is
paid for afterwards, and idle time is not saved up. All of the process's CPU time is counted: scoring comes first and is never held
up, tuning gets what it leaves. The clocks are parameters.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from streamrl_workers.ranker.folder import RankerModel
from streamrl_workers.ranker.pairs import Pair, PairStore, standardised

PASSES = 2
"""Over the pairs of a round; each is also drawn again as an old one."""
BATCH_PROMPTS = 8
"""Few, so that a mini-batch is short: scores wait for its end."""
MOST_NEW = 2
"""Times `refit_pairs`."""
_PREFIX, _PART, _ORIGIN = "model-", "part", "origin.json"
_NAME = re.compile(rf"{_PREFIX}(0|[1-9][0-9]{{0,17}})")
"""Of a model of ours."""
_END = object()


class Tuner:
    """Rounds over the pairs of a store."""

    def __init__(
        self,
        model: RankerModel,
        *,
        store: PairStore,
        models: "TunedModels",
        budget: "CpuBudget",
        refit_pairs: int,
        rounds: int,
    ) -> None:
        """`rounds`: done before."""
        self._model = model
        self._store = store
        self._models = models
        self._budget = budget
        self._refit_pairs = refit_pairs
        self._round: Iterator[None] | None = None
        self.rounds = rounds

    @property
    def due(self) -> bool:
        """Whether there is a mini-batch to run."""
        return self._round is not None or len(self._store.new()) >= self._refit_pairs

    def wait_s(self) -> float | None:
        """Seconds until the next mini-batch; None: there is none."""
        return self._budget.wait_s() if self.due else None

    def step(self) -> None:
        """Run one mini-batch; behind the last one of a round, save."""
        assert self.due
        if self._round is None:
            self._round = self._begin()
        if next(self._round, _END) is _END:
            self._round = None
            self.rounds += 1
            self._models.save(self.rounds, self._model.save)
            self._store.write()

    def _begin(self) -> Iterator[None]:
        new, old = self._store.new(), self._store.old()
        for pair, target in zip(new, standardised([pair.tokens for pair in new]), strict=True):
            pair.target = target
        new = new[-MOST_NEW * self._refit_pairs :]
        chosen: list[Pair] = new + Random(self.rounds).sample(old, min(len(new), len(old)))
        examples = [(pair.prompt, pair.target) for pair in chosen if pair.target is not None]
        return self._model.tuning(examples, passes=PASSES, batch_prompts=BATCH_PROMPTS, seed=self.rounds)


class TunedModels:
    """`model-<rounds>/` of one run: the newest one counts, if tuning began from the folder that the job names."""

    def __init__(self, folder: Path, *, origin: str) -> None:
        """`origin`: the folder that tuning began from. Makes `folder`, removes what a killed process left half written."""
        self._folder = folder
        self._origin = origin
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / _PART, ignore_errors=True)

    def newest(self) -> tuple[int, Path] | None:
        """(rounds, folder) of the newest model of this ranker."""
        return max(((rounds, path) for rounds, path in self._all() if self._is_ours(path)), default=None)

    def save(self, rounds: int, write: Callable[[Path], None]) -> None:
        """Keep what `write` puts into a folder, and nothing older."""
        part = self._folder / _PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        (part / _ORIGIN).write_text(json.dumps({"origin": self._origin}) + "\n", encoding="utf-8")
        older = self._all()
        target = self._folder / f"{_PREFIX}{rounds}"
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        for number, path in older:
            if number != rounds:
                shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[tuple[int, Path]]:
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match is not None]

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(json.loads((path / _ORIGIN).read_text(encoding="utf-8"))["origin"] == self._origin)
        except (OSError, ValueError, KeyError, TypeError):
            return False


class CpuBudget:
    """A share of one core."""

    def __init__(self, percent: float, *, wall_s: Callable[[], float], cpu_s: Callable[[], float]) -> None:
        """`percent` of one core, above 0; what the process has used so far is not counted."""
        assert percent > 0, "without a budget nothing is tuned"
        self._share = percent / 100
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._began_wall_s, self._began_cpu_s = wall_s(), cpu_s()

    def wait_s(self) -> float:
        """Seconds until work may begin; 0: now."""
        wall_s, cpu_s = self._wall_s(), self._cpu_s()
        wait_s = (cpu_s - self._began_cpu_s) / self._share - (wall_s - self._began_wall_s)
        if wait_s <= 0:
            self._began_wall_s, self._began_cpu_s = wall_s, cpu_s
        return max(0.0, wait_s)
