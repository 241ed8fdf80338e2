"""Rank 0 of a trainer, driven by JSON lines on its input: what the step loop does, at the test's command.

The other ranks are the real process, `python -m streamrl_workers.trainer`.
"""

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from streamrl.errors import EXIT_RETRY, EXIT_USER_ERROR, UserError
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from streamrl_workers.trainer.engines import create_engine
from streamrl_workers.trainer.engines.engine import FileHashes, RetryError, TrainEngine
from streamrl_workers.trainer.engines.process_group import ProcessGroup
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.rank_weights import rank_parts
from streamrl_workers.trainer.settings import TrainerSettings, read_settings
from streamrl_workers.weights.hashing import SliceBytes
from streamrl_workers.weights.store import WeightStore
from streamrl_workers.weights.transports import TRANSPORTS
from support.trainer_groups import make_group


class PublishedWeights:
    """What rank 0 publishes and serves, as `main.py` wires it."""

    def __init__(self, settings: TrainerSettings, ranks: ProcessGroup) -> None:
        self.store = WeightStore(newest_kept=2)
        self.server = TRANSPORTS["http"].serve(self.store, settings.server_setup)
        self.parts = rank_parts(settings, ranks=ranks)
        self._slices: Sequence[SliceBytes] = ()

    def copy(self, engine: TrainEngine, *, step: int) -> dict[str, Any]:
        """Copy a version; the collectives and bytes of that."""
        self.store.retain(lambda version: version.step == step - 1)
        with CommDebugMode() as calls:
            self._slices = engine.slices(attempt=1, step=step, kept=[(1, step - 1)])
        return {
            "collectives": calls.get_total_counts(),
            "own_bytes": sum(one.data.nbytes for one in self._slices),
        }

    def publish(self, *, step: int) -> dict[str, Any]:
        """Publish what was copied; its name, and where it is."""
        name = self.store.publish(
            attempt=1,
            step=step,
            slices=self._slices,
            parts=lambda: self.parts.ask(attempt=1, step=step),
        )
        self._slices = ()
        return {"version": name.SerializeToString().hex(), "address": self.server.address}


def act(engine: TrainEngine, command: dict[str, Any], *, weights: PublishedWeights | None = None) -> Any:
    """One command: `step`, `throughput`, `tensors`, `checkpoint`, `commit`, `copy`, `publish`, `save`, `load` or `export`."""
    if command["do"] == "step":
        engine.begin_step(command["step"], attempt=1)
        for number in range(command["groups"]):
            # One scored sample in the first group: where it goes alone, the other rank passes a dummy.
            rewards = (1.0, None) if number == 0 else (0.0, 1.0, 1.0, 0.5)
            engine.add([make_group(100 * command["step"] + number, step=command["step"], rewards=rewards)])
            engine.advance(idle=True)
        return engine.finish_step()
    if command["do"] == "throughput":
        return engine.throughput()
    if command["do"] == "tensors":
        return write_tensors(engine, Path(command["folder"]))
    if command["do"] == "copy":
        assert weights is not None
        return weights.copy(engine, step=command["step"])
    if command["do"] == "publish":
        assert weights is not None
        return weights.publish(step=command["step"])
    folder = Path(command["folder"])
    if command["do"] == "checkpoint":
        return write_checkpoint(engine, folder, full=command["full"])
    if command["do"] == "commit":
        meta = CheckpointMeta(step=command["step"], attempt=1, history=("00" * 16,) * command["step"])
        return str(CheckpointStore(folder, keep_last=2).write(meta, save=engine.save, sync=lambda: None))
    folder.mkdir(exist_ok=True)
    done = getattr(engine, command["do"])(folder)
    return done.result() if isinstance(done, Future) else done


def write_checkpoint(engine: TrainEngine, folder: Path, *, full: str) -> str:
    """With the file `full` on a disk that is full."""

    def save(directory: Path) -> "Future[FileHashes]":
        (directory / full).symlink_to("/dev/full")
        return engine.save(directory)

    meta = CheckpointMeta(step=1, attempt=1, history=("00" * 16,))
    return str(CheckpointStore(folder, keep_last=1).write(meta, save=save, sync=lambda: None))


def write_tensors(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """The published bytes as files; data types and shapes by name."""
    tensors = engine.tensors()
    for name, tensor in tensors.items():
        (folder / name).write_bytes(tensor.data)
    return {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()}


def say(answer: Any) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Say "ready", then one line for each command; ends with its input."""
    settings = read_settings(os.environ)
    try:
        ranks = ProcessGroup(settings.rendezvous, lost_code=settings.lost_code)
        setup = EngineSetup(
            spec=settings.spec,
            model_path=settings.model_path,
            threads=1,
            run_dir=settings.run_dir,
            env=settings.env,
            ranks=ranks.gather(),
        )
        engine = create_engine(setup)
        weights = PublishedWeights(settings, ranks)
        say("ready")
        for line in sys.stdin:
            say(act(engine, json.loads(line), weights=weights))
    except RetryError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_RETRY
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        ranks.end()
        return EXIT_USER_ERROR
    ranks.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
