"""The ranker's process: `python -m streamrl_workers.ranker FD`.

```
  scheduler ══ socket: score, learn ══▶ RANKER ── tunes its model between two frames, within its budget
            ◀═ scores, status ═════════        └── state_dir: pairs.jsonl, model-<rounds>/
```
The loop consumes frames and mini-batches that are due; produces an answer to each frame; waits for a frame, or until the budget allows the
next mini-batch; unblocked by the scheduler, by time, and by the end of the socket. When the scheduler is gone the socket ends it.

Owns the order: all frames that are there come before a mini-batch. Standard output is standard error here: nothing gets between the frames.
"""

import contextlib
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from streamrl.text import log_to_stderr
from streamrl_workers.process import framing
from streamrl_workers.process.heartbeat import start_heartbeat
from streamrl_workers.ranker import protocol
from streamrl_workers.ranker.folder import RankerModel, check_folder, model_class
from streamrl_workers.ranker.hashing import HashingRanker
from streamrl_workers.ranker.pairs import PairStore
from streamrl_workers.ranker.protocol import Opening, ProcessStatus
from streamrl_workers.ranker.tuning import CpuBudget, TunedModels, Tuner

_DIE_FIRST = "1000"
"""If memory runs out the kernel ends this process rather than the scheduler."""

log = logging.getLogger("streamrl.ranker")


def main() -> int:
    """Serve the scheduler until it is gone; the exit code."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    log_to_stderr()
    start_heartbeat()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_DIE_FIRST, encoding="ascii")
    frame = framing.receive(control)
    if frame is None:
        return EXIT_DONE
    opening = Opening.of(frame)
    try:
        ranker = open_tuned(opening) if opening.path else open_hashing(opening)
    except UserError as error:
        control.sendall(framing.encode(protocol.refusal(error)))
        return EXIT_USER_ERROR
    with contextlib.suppress(ConnectionError):  # the scheduler is gone
        ranker.serve(control)
    return EXIT_DONE


def open_hashing(opening: Opening) -> "RankerProcess":
    """With what the run has taught it so far."""
    Path(opening.state_dir).mkdir(parents=True, exist_ok=True)
    model, store = HashingRanker(), PairStore(Path(opening.state_dir))
    for pair in store.new():
        model.learn(pair.prompt, pair.tokens)
    return RankerProcess(model, store=store)


def open_tuned(opening: Opening) -> "RankerProcess":
    """The model that was tuned in this run, if there is one, else the one that was fitted."""
    origin = Path(opening.path)
    check_folder(origin, field=opening.field)
    models = TunedModels(Path(opening.state_dir), origin=opening.path)
    loader = model_class(field=opening.field)
    _one_thread()
    found = models.newest()
    try:
        rounds, model = (0, None) if found is None else (found[0], loader.load(found[1], field=opening.field))
    except UserError as error:
        log.info("the model that was tuned in this run is passed over: %s", error)
        rounds, model = 0, None
    model = model or loader.load(origin, field=opening.field)
    if opening.cpu_percent == 0:
        return RankerProcess(model)
    store = PairStore(Path(opening.state_dir))
    tuner = Tuner(model, store=store, models=models, refit_pairs=opening.refit_pairs, rounds=rounds)
    budget = CpuBudget(opening.cpu_percent, wall_s=time.monotonic, cpu_s=time.process_time)
    return RankerProcess(model, store=store, tuner=tuner, budget=budget)


class RankerProcess:
    """A model, what it learns from, and the loop."""

    def __init__(
        self,
        model: RankerModel | HashingRanker,
        *,
        store: PairStore | None = None,
        tuner: Tuner | None = None,
        budget: CpuBudget | None = None,
    ) -> None:
        """Without a `store` it learns nothing; without a `tuner` it learns each pair at once, if any."""
        self._model = model
        self._store = store
        self._tuner = tuner
        self._budget = budget

    def serve(self, control: socket.socket) -> None:
        """Until the scheduler closes the socket."""
        control.sendall(framing.encode(protocol.answer((), (), status=self._status())))
        while True:
            ready, _, _ = select.select([control], [], [], self._wait_s())
            if not ready:
                self._tune()
            elif (frame := framing.receive(control)) is not None:
                keys, scores = self._take(frame)
                control.sendall(framing.encode(protocol.answer(keys, scores, status=self._status())))
            else:
                return

    def _wait_s(self) -> float | None:
        """Seconds until the next mini-batch; None: there is none."""
        return (
            self._budget.wait_s() if self._budget is not None and self._tuner is not None and self._tuner.due else None
        )

    def _take(self, frame: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[float]]:
        """Keys and scores of the answer."""
        if "score" in frame:
            prompts = [str(prompt) for _, prompt in frame["score"]]
            return [int(key) for key, _ in frame["score"]], self._model.scores(prompts)
        pairs = [(str(prompt), float(tokens)) for prompt, tokens in frame["learn"]]
        if isinstance(self._model, HashingRanker):
            for prompt, tokens in pairs:
                self._model.learn(prompt, tokens)
        if self._store is not None:
            with _disk():
                self._store.add(pairs)
        return (), ()

    def _tune(self) -> None:
        assert self._tuner is not None
        with _disk():
            self._tuner.step()

    def _status(self) -> ProcessStatus:
        return ProcessStatus(
            rounds=0 if self._tuner is None else self._tuner.rounds,
            pairs=0 if self._store is None else len(self._store),
            cpu_s=time.process_time(),
        )


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """What cannot be saved is said, and is still in memory: scoring goes on."""
    try:
        yield
    except (OSError, UserError, SafetensorError) as error:
        log.warning("the ranker's state cannot be saved: %s", error)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
