"""A run's checkpoints with copies in an object store; as a program, a writer of them that can be killed.

python -m support.copied_checkpoints DIRECTORY      says "ready", waits for a line, writes; says each step that is written
"""

import sys
from pathlib import Path

from streamrl_workers.stream.object_store import ObjectFolder
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore

URL = "s3://runs/jobs"
FIELD = "spec.storage.checkpoints.url"
STEPS = (2, 4, 6)
_DIGEST = "00" * 16


def store(root: Path, *, url: str = URL) -> CheckpointStore:
    """Two of them are kept."""
    return CheckpointStore(root / "checkpoints", keep_last=2, copies=copies(url))


def copies(url: str = URL) -> ObjectFolder:
    """Where the copies are."""
    return ObjectFolder.at(url, field=FIELD).child("run")


def write(checkpoints: CheckpointStore, step: int) -> None:
    """A checkpoint of three files and its meta."""

    def save(directory: Path) -> None:
        (directory / "ranks").mkdir()
        for name in ("model", "ranks/0", "ranks/1"):
            (directory / name).write_text(f"{name} of step {step}")

    meta = CheckpointMeta(step=step, attempt=1, history=(_DIGEST,) * step)
    checkpoints.write(meta, save=save, sync=lambda: None)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """The program."""
    checkpoints = store(Path(sys.argv[1]))
    _say("ready")
    sys.stdin.readline()
    for step in STEPS:
        write(checkpoints, step)
        _say(str(step))


if __name__ == "__main__":
    main()
