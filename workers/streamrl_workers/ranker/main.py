"""The ranker's process: `python -m streamrl_workers.ranker FD`.

```
  scheduler ══ socket: score, learn ══▶ RANKER ── tunes the model between two requests, within its budget
            ◀═ scores, numbers ════════        └── state_dir: model-<rounds>/, pairs.jsonl
```
The loop consumes frames and mini-batches that are due; produces scores, and numbers after each round; waits for a frame, or until the budget
allows the next mini-batch; unblocked by the scheduler, by time, and by the end of the socket. When the scheduler is gone the lifeline ends it,
also inside a long computation.

Owns the order: all frames that are there come before a mini-batch. Standard output is standard error here: what libraries print cannot get
between the frames.
"""

import contextlib
import importlib
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from streamrl_workers.ranker import protocol
from streamrl_workers.ranker.budget import CpuBudget
from streamrl_workers.ranker.folders import check_folder
from streamrl_workers.ranker.pairs import PairStore
from streamrl_workers.ranker.protocol import Opening, ProcessNumbers
from streamrl_workers.ranker.state import ModelState
from streamrl_workers.ranker.tuner import Tuner
from streamrl_workers.stream.lifeline import watch_lifeline
from streamrl_workers.tasks import framing

MODELS = {
    "languageModel": ("streamrl_workers.ranker.language_model", "LanguageModel"),
    "policyFeatures": ("streamrl_workers.ranker.policy_features", "PolicyFeatures"),
}
"""Ranker -> module and class; both import torch."""
TUNED = ("languageModel",)
_DIE_FIRST = "1000"
"""If memory runs out the kernel ends this process rather than the scheduler."""

log = logging.getLogger("streamrl.ranker")


class Model(Protocol):
    """What scores."""

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Higher = longer."""


def main() -> int:
    """Serve the scheduler until it is gone; the exit code."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    watch_lifeline(os.environ)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_DIE_FIRST, encoding="ascii")
    frame = framing.receive(control)
    if frame is None:
        return EXIT_DONE
    try:
        process = _open(Opening.of(frame), control)
    except UserError as error:
        control.sendall(framing.encode(protocol.refusal(error)))
        return EXIT_USER_ERROR
    with contextlib.suppress(ConnectionError):  # the scheduler is gone
        process.run()
    return EXIT_DONE


def _open(opening: Opening, control: socket.socket) -> "RankerProcess":
    """Load the model: that of the run, if it has one, else the one that was fitted."""
    origin = Path(opening.path)
    check_folder(origin, ranker=opening.ranker, field=opening.field)
    state = ModelState(Path(opening.state_dir), origin=opening.path)
    loader = _loader(opening)
    _one_thread()
    found = state.newest()
    try:
        rounds, model = (0, None) if found is None else (found[0], loader.load(found[1], field=opening.field))
    except UserError as error:
        log.info("the model that was tuned in this run is passed over: %s", error)
        rounds, model = 0, None
    model = model or loader.load(origin, field=opening.field)
    if opening.ranker not in TUNED or opening.cpu_percent == 0:
        return RankerProcess(control, model, tuning=None)
    store = PairStore(Path(opening.state_dir), first=origin)
    tuner = Tuner(
        model,
        store=store,
        refit_pairs=opening.refit_pairs,
        rounds=rounds,
        save=lambda number: state.save(number, model.save),
    )
    budget = CpuBudget(opening.cpu_percent, wall_s=time.monotonic, cpu_s=time.process_time)
    return RankerProcess(control, model, tuning=Tuning(tuner, store, budget))


def _loader(opening: Opening) -> Any:  # noqa: ANN401 - a class of a module that needs torch
    module, name = MODELS[opening.ranker]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        rule = f"needs the package {error.name}, which is not installed"
        raise UserError(field=opening.field, rule=rule, fix="install streamrl[worker]") from None


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """What cannot be saved is said, and is still in memory: scoring goes on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        log.warning("the ranker's state cannot be saved: %s", error)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


class Tuning:
    """A tuner with its pairs and its budget."""

    def __init__(self, tuner: Tuner, store: PairStore, budget: CpuBudget) -> None:
        self.tuner = tuner
        self.store = store
        self._budget = budget

    def wait_s(self) -> float | None:
        """Seconds until the next mini-batch; None: there is none."""
        return self._budget.wait_s() if self.tuner.due else None


class RankerProcess:
    """The loop."""

    def __init__(self, control: socket.socket, model: Model, *, tuning: Tuning | None) -> None:
        self._control = control
        self._model = model
        self._tuning = tuning

    def run(self) -> None:
        """Until the scheduler closes the socket."""
        self._send(protocol.ready(self._numbers()))
        while True:
            wait_s = None if self._tuning is None else self._tuning.wait_s()
            ready, _, _ = select.select([self._control], [], [], wait_s)
            if ready:
                frame = framing.receive(self._control)
                if frame is None:
                    return
                self._take(frame)
            else:
                self._tune()

    def _take(self, frame: Mapping[str, Any]) -> None:
        if "learn" in frame:
            if self._tuning is not None:
                with _disk():
                    self._tuning.store.add((str(prompt), float(tokens)) for prompt, tokens in frame["learn"])
            return
        keys = [int(key) for key, _ in frame["score"]]
        scores = self._model.scores([str(prompt) for _, prompt in frame["score"]])
        self._send(protocol.answer(keys, scores, numbers=self._numbers()))

    def _tune(self) -> None:
        assert self._tuning is not None
        tuner = self._tuning.tuner
        rounds = tuner.rounds
        with _disk():
            tuner.step()
        if tuner.rounds != rounds:
            log.info("round %d of tuning is done; %d pairs are remembered", tuner.rounds, len(self._tuning.store))
            self._send(protocol.answer((), (), numbers=self._numbers()))

    def _numbers(self) -> ProcessNumbers:
        if self._tuning is None:
            return ProcessNumbers(cpu_s=time.process_time())
        return ProcessNumbers(
            rounds=self._tuning.tuner.rounds, pairs=len(self._tuning.store), cpu_s=time.process_time()
        )

    def _send(self, frame: Mapping[str, Any]) -> None:
        self._control.sendall(framing.encode(frame))
