"""Checkpoints on disk: order, damage, fall-back, how many are kept."""

import json
from hashlib import blake2b
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_workers.stream.digests import read_sealed, seal
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore, discard_export

DIGEST = "00" * 16


def _save(directory: Path) -> None:
    (directory / "state").mkdir()
    (directory / "state" / "tensors").write_bytes(b"weights")


def _write(store: CheckpointStore, step: int) -> Path:
    return store.write(CheckpointMeta(step=step, attempt=1, history=(DIGEST,) * step), save=_save, sync=lambda: None)


def test_no_checkpoint_yet(tmp_path):
    assert CheckpointStore(tmp_path / "checkpoints", keep_last=2).newest() is None


def test_the_newest_is_found_with_its_meta(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    _write(store, 1)
    directory = _write(store, 3)
    found = store.newest()
    assert found.directory == directory == tmp_path / "step-00000003"
    assert (found.meta.step, found.meta.attempt, found.meta.history) == (3, 1, (DIGEST,) * 3)
    document = json.loads((directory / "meta.json").read_text())
    assert document["complete"] is True
    assert list(document["files"]) == ["state/tensors"]


def test_only_the_last_few_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        _write(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_it_is_renamed_only_after_the_journal_is_on_disk(tmp_path):
    seen = []
    CheckpointStore(tmp_path, keep_last=1).write(
        CheckpointMeta(step=1, attempt=1, history=(DIGEST,)),
        save=_save,
        sync=lambda: seen.extend(p.name for p in tmp_path.iterdir()),
    )
    assert seen == [".partial-step-00000001"]


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    with pytest.raises(ZeroDivisionError):
        store.write(CheckpointMeta(step=1, attempt=1, history=(DIGEST,)), save=_save, sync=lambda: 1 // 0)
    assert store.newest() is None
    store.clean()
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_name_of_ours_stays_and_no_link_is_followed(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (root / ".partial-notes").mkdir(parents=True)
    for name in (".partial-step-00000009", "step-00000000"):
        (root / name).symlink_to(elsewhere)
    (root / ".partial-replaced-step-00000007").touch()
    store = CheckpointStore(root, keep_last=1)
    store.clean()
    store.write(CheckpointMeta(step=1, attempt=1, history=(DIGEST,)), save=_save, sync=lambda: None)
    assert sorted(path.name for path in root.iterdir()) == [".partial-notes", "step-00000001"]
    assert (elsewhere / "precious").exists()


def _truncate(directory: Path) -> None:
    (directory / "state" / "tensors").write_bytes(b"weig")


def _flip(directory: Path) -> None:
    (directory / "state" / "tensors").write_bytes(b"weightz")


def _remove(directory: Path) -> None:
    (directory / "state" / "tensors").unlink()


def _break_meta(directory: Path) -> None:
    (directory / "meta.json").write_text("{")


def _foreign_meta(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps(meta | {"step": 9}))


def _flip_a_digest(directory: Path) -> None:
    """Of the history, which the engine's files know nothing of."""
    text = (directory / "meta.json").read_text()
    (directory / "meta.json").write_text(text.replace(DIGEST, DIGEST[:-1] + "1", 1))


def _flip_the_attempt(directory: Path) -> None:
    text = (directory / "meta.json").read_text()
    (directory / "meta.json").write_text(text.replace('"attempt": 1', '"attempt": 3'))


def _old_meta(directory: Path) -> None:
    """Of before it had a digest of itself."""
    meta = json.loads((directory / "meta.json").read_text())
    del meta["digest"]
    (directory / "meta.json").write_text(json.dumps(meta))


def _list_meta(directory: Path) -> None:
    (directory / "meta.json").write_text("[]")


DAMAGES = [
    _truncate,
    _flip,
    _remove,
    _break_meta,
    _foreign_meta,
    _flip_a_digest,
    _flip_the_attempt,
    _old_meta,
    _list_meta,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_passed_over_with_one_warning(tmp_path, caplog, damage):
    store = CheckpointStore(tmp_path, keep_last=2)
    _write(store, 1)
    damage(_write(store, 2))
    assert store.newest().meta.step == 1
    assert len(caplog.records) == 1
    assert "step-00000002 is damaged" in caplog.text
    _write(store, 2)  # trained again
    assert store.newest().meta.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def _hashed_by(directory: Path, name: str) -> None:
    """As another release would have written it."""
    meta = read_sealed(directory / "meta.json")
    meta["files"]["state/tensors"]["hash"] = name + blake2b(b"weights", digest_size=16).hexdigest()
    (directory / "meta.json").write_text(seal(meta))


def test_a_checkpoint_of_an_earlier_release_is_read_and_checked(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    directory = _write(store, 1)
    _hashed_by(directory, "")
    assert store.newest().meta.step == 1
    _flip(directory)
    with pytest.raises(UserError, match="state/tensors is not what was written"):
        store.newest()


def test_hashes_of_a_later_release_are_told_by_name(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    _hashed_by(_write(store, 1), "blake9:")
    with pytest.raises(UserError, match="state/tensors is hashed by blake9, this StreamRL knows blake3"):
        store.newest()


def test_if_all_are_damaged_the_user_is_told(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        _flip(_write(store, step))
    with pytest.raises(
        UserError, match=r"holds no good checkpoint \(step-00000002: state/tensors is not what was written"
    ):
        store.newest()


def test_a_full_disk_is_the_users_error_and_keeps_what_is_there(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    _write(store, 1)

    def fill_the_disk(_directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="a checkpoint cannot be written: No space left on device; free the disk"):
        store.write(CheckpointMeta(step=2, attempt=1, history=(DIGEST,) * 2), save=fill_the_disk, sync=lambda: None)
    assert store.newest().meta.step == 1


def test_what_was_exported_goes_where_the_run_goes_on(tmp_path):
    discard_export(tmp_path / "model")  # there is none yet
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"of an earlier end")
    discard_export(tmp_path / "model")
    assert not (tmp_path / "model").exists()
