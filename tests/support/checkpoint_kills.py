"""A trainer killed at every change that it makes to its folder of checkpoints, and started again: `python -m support.checkpoint_kills FOLDER [EVERY]`.

Each life is a fork of this process, which has loaded torch. A life that is to be killed ends by SIGKILL in an audit hook, before the change.
Prints a line of JSON for each kill: which change, what the scheduler had heard of, and the hashes of the weights in the end.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.session import Session
from streamrl_workers.trainer.step_loop import StepLoop
from streamrl_workers.weights.hashing import tensors_hash
from streamrl_workers.weights.store import WeightStore
from support.tiny_trainer import tiny_engine
from support.trainer_groups import make_group, trainer_spec

STEPS = 4
CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events that change a folder, or look into it; calls between two of them write."""


class Life(Session):
    """A session whose scheduler answers at once, and notes on the disk what it heard of."""

    def __init__(self, step: int, *, heard: Path) -> None:
        super().__init__(pb.TrainerHello(trainer_id="trainer-0", instance="i"), step=step, window_bytes=2**20)
        self._heard = heard
        self._groups = iter(make_group(number, step=number) for number in range(step, STEPS))
        self._tell(welcome=pb.TrainerWelcome(attempt=1, batch_groups=1))

    def _tell(self, **command: Any) -> None:
        self.received(pb.TrainerCommand(**command), send=self._answer)

    def _answer(self, events: Sequence[pb.TrainerEvent]) -> None:
        for event in events:
            if event.HasField("step_done"):
                self._tell(step_recorded=pb.StepRecorded(step=event.step_done.step))
            elif event.HasField("sync_journal"):
                self._tell(journal_synced=pb.JournalSynced(step=event.sync_journal.step))
            elif event.HasField("checkpointed"):
                with self._heard.open("a") as file:
                    file.write(f"{event.checkpointed.step}\n")
                if event.checkpointed.exported:
                    self._tell(stop=pb.Stop(reason="done"))

    def wait_change(self, *, seen_cause: str, timeout_s: float) -> None:
        self._tell(group=next(self._groups))


def live(folder: Path, *, kill_at: int | None) -> None:
    """One life, from the newest checkpoint to the end, or to change number `kill_at`; leaves the number of changes and the hash."""
    seen, root = 0, str(folder / "checkpoints")

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES and str(args[0]).startswith(root):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    engine = tiny_engine(trainer_spec(steps=STEPS))
    store = CheckpointStore(folder / "checkpoints", keep_last=2)
    store.clean()
    found = store.newest()
    if found is not None:
        engine.load(found.directory)
    heard = folder / "heard"
    promised = max(map(int, heard.read_text().split()), default=0) if heard.exists() else 0
    history = History() if found is None else found.meta.past
    assert len(history) >= promised, (
        f"the scheduler heard of step {promised}, the newest checkpoint is of {len(history)}"
    )
    StepLoop(
        engine=engine,
        session=Life(len(history), heard=heard),
        checkpoints=store,
        weights=WeightStore(newest_kept=1),
        recorder=Recorder(sink=None, metrics=None),
        history=history,
        steps=STEPS,
        checkpoint_interval_steps=1,
        evaluation_interval_steps=STEPS,
        store_dir=folder,
    ).run()
    (folder / "ended.json").write_text(json.dumps({"changes": seen, "hash": tensors_hash(engine.tensors()).hex()}))


def forked(folder: Path, *, kill_at: int | None = None) -> int:
    """A life in a process of its own; its status as `os.waitpid` has it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(folder, kill_at=kill_at)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main() -> None:
    torch.set_num_threads(1)
    root, every = Path(sys.argv[1]), int(sys.argv[2])
    whole = root / "whole"
    whole.mkdir()
    assert forked(whole) == 0
    expected = json.loads((whole / "ended.json").read_text())
    for kill_at in range(1, expected["changes"] + 1, every):
        folder = root / str(kill_at)
        folder.mkdir()
        status = [forked(folder, kill_at=kill_at), forked(folder)]
        ended = json.loads((folder / "ended.json").read_text()) if (folder / "ended.json").exists() else {}
        kill = {"kill_at": kill_at, "status": status, "same": ended.get("hash") == expected["hash"]}
        sys.stdout.write(f"{json.dumps(kill)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
