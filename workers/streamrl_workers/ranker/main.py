"""The ranker's process: `python -m streamrl_workers.ranker FD`.

```
  scheduler ══ socket: score, learn ══▶ RANKER ── tunes its model between two frames, within its budget
            ◀═ scores, status ═════════        └── state_dir: pairs.jsonl, model-<rounds>/
```
The loop consumes frames and mini-batches that are due; produces an answer to each frame; waits for a frame, or until the budget allows the
next mini-batch; unblocked by the scheduler, by time, and by the end of the socket. When the scheduler is gone the socket ends it.

Frames, as `process/framing.py` carries them:

    from the scheduler   {"ranker": as the job has it, "base_dir": .., "state_dir": ..}, once
                         then {"score": [[key, prompt], ..]} or {"learn": [[prompt, tokens], ..]}
    to the scheduler     {"scores": [[key, score], ..], "status": {"rounds": .., "pairs": .., "cpu_s": ..}}, for each frame
                         {"user_error": {..}} for the first, if its folder cannot be used

Owns the order: all frames that are there come before a mini-batch.
"""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from streamrl.spec.scheduling import RankerSpec
from streamrl_workers.process import framing
from streamrl_workers.process.child import begin_as_child
from streamrl_workers.ranker.folder import FIELD, RankerModel, model_class
from streamrl_workers.ranker.hashing import HashingRanker
from streamrl_workers.ranker.pairs import PairStore
from streamrl_workers.ranker.tuning import CpuBudget, TunedModels, Tuner

log = logging.getLogger("streamrl.ranker")


def main() -> int:
    """Serve the scheduler until it is gone; the exit code."""
    control = begin_as_child()
    frame = framing.receive(control)
    if frame is None:
        return EXIT_DONE
    choice = RankerSpec.model_validate(frame["ranker"])
    try:
        ranker = open_ranker(choice, base_dir=Path(frame["base_dir"]), state_dir=Path(frame["state_dir"]))
    except UserError as error:
        control.sendall(framing.encode({"user_error": error.parts}))
        return EXIT_USER_ERROR
    with contextlib.suppress(ConnectionError):  # the scheduler is gone
        ranker.serve(control)
    return EXIT_DONE


def open_ranker(choice: RankerSpec, *, base_dir: Path, state_dir: Path) -> "RankerProcess":
    """With what the run has taught it so far. `base_dir`: where relative paths of the job begin; `state_dir`: its folder in the run's."""
    state_dir.mkdir(parents=True, exist_ok=True)
    store, options = PairStore(state_dir), choice.language_model
    if options is None:
        hashing = HashingRanker()
        for pair in store.new():
            hashing.learn(pair.prompt, pair.tokens)
        return RankerProcess(hashing, store=store)
    origin = (base_dir / options.path).resolve()
    models = TunedModels(state_dir, origin=str(origin))
    loader = model_class(field=FIELD)
    rounds, folder = models.newest() or (0, origin)
    try:
        model = loader.load(folder, field=FIELD)
    except UserError as error:
        if folder == origin:
            raise
        log.info("the model that was tuned in this run is passed over: %s", error)
        rounds, model = 0, loader.load(origin, field=FIELD)
    if not options.cpu_percent:
        return RankerProcess(model, store=store)
    budget = CpuBudget(options.cpu_percent, wall_s=time.monotonic, cpu_s=time.process_time)
    tuner = Tuner(model, store=store, models=models, refit_pairs=options.refit_pairs, rounds=rounds, budget=budget)
    return RankerProcess(model, store=store, tuner=tuner)


class RankerProcess:
    """A model, what it learns from, and the loop."""

    def __init__(self, model: RankerModel | HashingRanker, *, store: PairStore, tuner: Tuner | None = None) -> None:
        """`tuner`: of a language model; None: it is never tuned."""
        self._model = model
        self._store = store
        self._tuner = tuner

    def serve(self, control: socket.socket) -> None:
        """Until the scheduler closes the socket."""
        control.sendall(framing.encode(self._answer([])))
        while True:
            wait_s = None if self._tuner is None else self._tuner.wait_s()
            ready, _, _ = select.select([control], [], [], wait_s)
            if not ready:
                self._tune()
            elif (frame := framing.receive(control)) is not None:
                control.sendall(framing.encode(self._answer(self._take(frame))))
            else:
                return

    def _take(self, frame: Mapping[str, Any]) -> list[tuple[int, float]]:
        """Scores by key, if it asks for any."""
        if "score" in frame:
            keys, prompts = zip(*frame["score"], strict=True)
            return list(zip(keys, self._model.scores(prompts), strict=True))
        if isinstance(self._model, HashingRanker):
            for prompt, tokens in frame["learn"]:
                self._model.learn(prompt, tokens)
        with _disk():
            self._store.add(frame["learn"])
        return []

    def _tune(self) -> None:
        assert self._tuner is not None
        with _disk():
            self._tuner.step()

    def _answer(self, scores: list[tuple[int, float]]) -> dict[str, Any]:
        rounds = 0 if self._tuner is None else self._tuner.rounds
        return {
            "scores": scores,
            "status": {"rounds": rounds, "pairs": len(self._store), "cpu_s": time.process_time()},
        }


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """What cannot be saved is said, and is still in memory: scoring goes on."""
    try:
        yield
    except (OSError, UserError, SafetensorError) as error:
        log.warning("the ranker's state cannot be saved: %s", error)
