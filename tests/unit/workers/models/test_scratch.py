"""Scratch models: the tokenizer's round trip, seeded weights, loading and its refusals."""

from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.spec.model import HuggingFaceModel, ScratchModel
from streamrl_workers.models import load
from streamrl_workers.models.load import load_model, load_structure, load_tokenizer
from streamrl_workers.models.scratch import build_model, build_tokenizer

TINY = ScratchModel.model_validate(
    {"hiddenSize": 16, "layers": 2, "heads": 2, "intermediateSize": 16, "maxPositions": 32}
)
TEXT = "4+3 -2=-5\né"


def saved(directory: Path, *, seed: int = 0) -> str:
    tokenizer = build_tokenizer(frozenset(TEXT), max_positions=TINY.max_positions)
    tokenizer.save_pretrained(directory)
    build_model(TINY, tokenizer=tokenizer, seed=seed).save_pretrained(directory)
    return str(directory)


def test_tokenizer_makes_one_token_a_character_and_comes_back_from_disk(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path))  # beside a model: AutoTokenizer looks at its type, too
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == TEXT
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 3 + len(set(TEXT))


def test_a_character_outside_the_vocabulary_is_an_error_and_not_a_gap() -> None:
    tokenizer = build_tokenizer(frozenset("abc"), max_positions=8)
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("abx")


def test_weights_follow_from_the_seed_and_leave_the_global_state_alone() -> None:
    tokenizer = build_tokenizer(frozenset("ab"), max_positions=8)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    one, two, other = (build_model(TINY, tokenizer=tokenizer, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_model_comes_back_bit_for_bit_in_fp32_and_eval_mode(tmp_path: Path) -> None:
    path = saved(tmp_path, seed=3)
    built = build_model(TINY, tokenizer=build_tokenizer(frozenset(TEXT), max_positions=32), seed=3).state_dict()
    model, structure = load_model(path), load_structure(path)
    assert all(torch.equal(tensor, built[name]) for name, tensor in model.state_dict().items())
    assert {name: tensor.shape for name, tensor in structure.state_dict().items()} == {
        name: tensor.shape for name, tensor in built.items()
    }
    assert {p.dtype for p in [*model.parameters(), *structure.parameters()]} == {torch.float32}
    assert not model.training
    assert not structure.training
    assert model.config.tie_word_embeddings


def break_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"no weights")


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def unknown_kind(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "no-such"}', encoding="utf-8")


@pytest.mark.parametrize("damage", [break_weights, remove_config, unknown_kind])
def test_a_broken_model_is_one_line(tmp_path: Path, damage) -> None:
    path = saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer of .* cannot be loaded") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_no_character_is_no_vocabulary() -> None:
    with pytest.raises(UserError, match="non-empty text"):
        build_tokenizer(frozenset(), max_positions=8)


@pytest.mark.parametrize("error", [OSError("cannot reach the hub\nsecond line"), ValueError("bad name"), OSError()])
def test_what_the_hub_raises_is_one_line(monkeypatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(load, "snapshot_download", refuse)
    with pytest.raises(UserError, match="cannot be fetched") as caught:
        load.download(HuggingFaceModel(name="org/model", revision="v1"))
    assert "org/model@v1" in str(caught.value)
    assert "\n" not in str(caught.value)
