"""Published tensors are those that `save_pretrained` writes, name by name and byte by byte, and generators take them back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from streamrl.errors import UserError
from streamrl_workers.models.checkpoint_layout import CheckpointLayout
from streamrl_workers.models.load import load_model, load_structure, load_tokenizer
from streamrl_workers.models.published import Parameters, as_tensor
from streamrl_workers.trainer.engines import model_files
from support.model_families import FAMILIES, save_tiny

DENSE = FAMILIES.keys() - {"qwen3_moe", "mixtral", "deepseek_v3"}
"""Families whose modules have the tensors of the checkpoint."""


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return save_tiny(family, tmp_path / "model", seed=1)


def test_a_trainer_publishes_what_a_checkpoint_has(family: str, folder: Path) -> None:
    model = load_model(str(folder))
    published, saved = model_files.tensors(model), load_file(folder / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(as_tensor(published[name]), tensor) for name, tensor in saved.items())
    if family in DENSE:
        assert list(published) == list(dict(model.named_parameters()))


def test_a_model_takes_back_what_was_published(folder: Path) -> None:
    model, other = load_model(str(folder)), load_structure(str(folder))
    parameters = Parameters(other)
    parameters.load(model_files.tensors(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert parameters.snapshot() == model_files.tensors(model)


def test_an_export_is_the_checkpoint_again(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder))
    (tmp_path / "export").mkdir()
    model_files.export(
        tmp_path / "export",
        model=model,
        published=model_files.tensors(model),
        tokenizer=load_tokenizer(str(folder)),
    )
    exported, saved = load_file(tmp_path / "export" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_a_renamed_tensor_and_a_missing_one_are_named(folder: Path) -> None:
    """Of a model with experts one expert's."""
    tensors = model_files.tensors(load_model(str(folder)))
    parameters = Parameters(load_structure(str(folder)))
    name = next((name for name in reversed(tensors) if ".experts." in name), "model.norm.weight")
    without = {other: tensor for other, tensor in tensors.items() if other != name}
    with pytest.raises(ValueError, match=f"^weights lack tensors of the model: {name}$"):
        parameters.load(without)
    with pytest.raises(ValueError, match=f"^weights name tensors that the model does not have: {name}_$"):
        parameters.load(without | {f"{name}_": tensors[name]})


def test_a_model_that_is_saved_otherwise_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        CheckpointLayout(AutoConfig.for_model("hrm_text"))
    (line,) = refused.value.lines
    assert line.startswith("spec.model: must be saved in parts of its own tensors; hrm_text is not: model.")
