"""A teacher is found, and refused where the policy's token ids mean something else to it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.spec.model import FrozenModel
from streamrl_workers.models.frozen import TEACHER, check_same_tokens, frozen_directory
from support.tiny_folder import tiny_folder


def _renamed(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"w7"', '"w-seven"'))


def _ends_otherwise(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "w2"}))


def _knows_fewer(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 31}))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_renamed, "must share the tokenizer of spec.model: 2 tokens differ, the first is 'w"),
        (_ends_otherwise, "must end by the same token as spec.model: 'w1', its own is 'w2'"),
        (_knows_fewer, "must know all 33 token ids of spec.model: it has 31"),
    ],
)
def test_another_tokenizer_is_refused_with_one_line(tmp_path: Path, change: Callable[[Path], None], rule: str) -> None:
    policy, teacher = tiny_folder(tmp_path / "policy"), tiny_folder(tmp_path / "teacher")
    check_same_tokens(str(teacher), policy=str(policy), field=TEACHER)
    change(teacher)
    with pytest.raises(UserError, match=rule) as refused:
        check_same_tokens(str(teacher), policy=str(policy), field=TEACHER)
    assert "\n" not in str(refused.value)


def test_a_directory_is_found_beside_the_job_and_an_absent_one_is_named(tmp_path: Path) -> None:
    model = FrozenModel.model_validate({"path": {"directory": "teacher"}})
    with pytest.raises(UserError, match=r"teacher\.path\.directory: must be a directory, got 'teacher'"):
        frozen_directory(model, base_dir=tmp_path, field=TEACHER)
    (tmp_path / "teacher").mkdir()
    assert frozen_directory(model, base_dir=tmp_path, field=TEACHER) == str((tmp_path / "teacher").resolve())
