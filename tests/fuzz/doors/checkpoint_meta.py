"""A checkpoint's `meta.json`, to a trainer that resumes and to `streamrl journal check`: damaged, or what was written."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError
from streamrl.files import parse_json
from streamrl_workers.stream import digests
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore


def _written(root: Path) -> tuple[CheckpointStore, Path]:
    """A store with one checkpoint, after three steps."""
    history = History()
    for group_id in range(3):
        history = history.with_step([2 * group_id, 2 * group_id + 1])
    store = CheckpointStore(root, keep_last=1)
    meta = CheckpointMeta.of(history, attempt=1)
    directory = store.write(meta, save=_save, sync=lambda: None)
    return store, directory / "meta.json"


def _save(folder: Path) -> None:
    (folder / "tensors").write_bytes(b"weights")


@contextmanager
def opened() -> Iterator[Enter]:
    """The store of a run; each input takes the place of the file."""
    with tempfile.TemporaryDirectory() as directory:
        store, file = _written(Path(directory))
        found = store.newest()
        assert found is not None

        def enter(data: bytes) -> str:
            file.write_bytes(data)
            try:
                tried = store.newest()
            except UserError as error:
                return "".join(letter for letter in error.rule if letter.isalpha() or letter == " ")[-40:]
            assert tried is not None
            assert tried.meta == found.meta, "taken for what was written"
            return "whole"

        yield enter


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
    words=[b'"step": 3', b'"history": []', b'"digest": ""', b'"folded_steps": 1', b'"complete": false', b'"files": {}'],
    most_input=1 << 20,
    most_held=64 << 20,
    plant=plant,
)
