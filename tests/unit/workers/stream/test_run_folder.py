"""A run folder belongs to one job: a volume that an earlier job of the same name has kept is no run of this one."""

import json
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.keys import FILE_STORE
from streamrl_workers.stream.run_folder import claim_run_folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_says_where_the_checkpoints_are_and_takes_its_own_again(run_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store" / "sum-12345678"
    for _ in range(2):
        claim_run_folder(run_dir, store=store)
        assert json.loads((run_dir / FILE_STORE).read_text()) == {"path": str(store)}
        assert store.is_dir()
        store.rmdir()


def test_refuses_another_jobs_run(run_dir: Path, tmp_path: Path) -> None:
    claim_run_folder(run_dir, store=tmp_path / "sum-12345678")
    with pytest.raises(UserError, match=r"storage\.journal: .*sum-87654321, got .*sum-12345678"):
        claim_run_folder(run_dir, store=tmp_path / "sum-87654321")
    assert json.loads((run_dir / FILE_STORE).read_text()) == {"path": str(tmp_path / "sum-12345678")}


def test_a_local_run_has_all_in_one_folder(run_dir: Path) -> None:
    claim_run_folder(run_dir, store=run_dir)
    assert not (run_dir / FILE_STORE).exists()


def test_a_store_that_cannot_be_written(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        claim_run_folder(run_dir, store=tmp_path / "file" / "sum")
