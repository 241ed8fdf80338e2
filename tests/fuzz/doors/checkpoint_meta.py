"""A checkpoint's `meta.json`, to a trainer that resumes and to `streamrl journal check`: damaged, what was written, or sealed by somebody else."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError
from streamrl.files import parse_json
from streamrl.keys import DIR_CHECKPOINTS
from streamrl_workers.scheduler.journal.check import CHECKPOINT_META, check_run
from streamrl_workers.stream import digests
from streamrl_workers.stream.digests import seal
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from support.journal_stories import finished


def _written(parent: Path) -> tuple[Path, Path]:
    """A run with one checkpoint, and the file."""
    run_dir = asyncio.run(finished(parent))
    *older, newest = sorted((run_dir / DIR_CHECKPOINTS).iterdir())
    for checkpoint in older:
        shutil.rmtree(checkpoint)
    return run_dir, newest / CHECKPOINT_META


@contextmanager
def opened() -> Iterator[Enter]:
    """A run folder; each input takes the place of the file, and what can be sealed does once more with its digest."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, file = _written(Path(directory))
        store = CheckpointStore(run_dir / DIR_CHECKPOINTS, keep_last=1)
        found = store.newest()
        assert found is not None

        def enter(data: bytes) -> str:
            file.write_bytes(data)
            tried = _newest(store)
            assert tried in (None, found.meta), "taken for what was written"
            verdict = _checked(run_dir)
            assert tried is not None or verdict != "exact", "vouched for"
            with contextlib.suppress(ValueError, RecursionError, TypeError):
                file.write_text(seal(parse_json(data.decode())))
            return f"{verdict}; {_newest(store) is not None} {_checked(run_dir)}"

        yield enter


def _newest(store: CheckpointStore) -> CheckpointMeta | None:
    try:
        newest = store.newest()
    except UserError:
        return None
    assert newest is not None
    return newest.meta


def _checked(run_dir: Path) -> str:
    try:
        report = check_run(run_dir)
    except UserError as error:
        return "".join(letter for letter in error.rule if letter.isalpha() or letter == " ")[-40:]
    said = report.violations[0] if report.violations else "exact"
    return "".join(letter for letter in said if letter.isalpha() or letter == " ")[:60]


def plant(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares the file with its digest."""
    patch.setattr(digests, "unseal", _without_digest)


def _without_digest(text: str) -> dict[str, Any]:
    document: dict[str, Any] = parse_json(text)
    del document["digest"]
    return document


def _honest() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        return [_written(Path(directory))[1].read_bytes()]


DOOR = Door(
    name="checkpoint_meta",
    opened=opened,
    honest=_honest(),
    words=[
        b'"step": 14',
        b'"history": []',
        b'"digest": ""',
        b'"folded_steps": 1',
        b'"complete": false',
        b'"files": {}',
    ],
    most_input=1 << 20,
    most_held=64 << 20,
    plant=plant,
)
