"""Model folders by strangers: pickles, other files' names, code, templates without end. Nothing of them runs; each is refused in a line."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.errors import UserError
from streamrl_workers.models import template_check
from streamrl_workers.models.load import load_config, load_encoder, load_model, load_structure, load_tokenizer
from streamrl_workers.models.template_check import check_template
from support.chat_models import TEMPLATE, chat_tokenizer
from support.tiny_folder import tiny_folder

INDEX = "model.safetensors.index.json"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='a' * 2**20) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model")


class Touch:
    """Makes a file when it is unpickled by whoever runs what a pickle says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def put(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | values))


@pytest.mark.parametrize("load", [load_model, load_encoder])
def test_weights_in_a_pickle_are_no_weights(folder: Path, load: Callable[[str], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        load(str(folder))


def test_pickles_beside_the_weights_are_not_opened(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for name in ("pytorch_model.bin", "training_args.bin", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Touch(made)))
    load_model(str(folder))
    assert not made.exists()


@pytest.mark.parametrize("shard", ["../elsewhere/model.safetensors", "/etc/passwd", "weights.bin", 7])
def test_an_index_names_shards_of_its_folder_alone(folder: Path, shard: object) -> None:
    shutil.copytree(folder, folder.parent / "elsewhere")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(names, folder / "weights.bin")
    put(folder / INDEX, metadata={"total_size": 1}, weight_map=dict.fromkeys(names, shard))
    with pytest.raises(UserError, match=rf"{INDEX}: must name \*\.safetensors in its own folder, got"):
        load_config(str(folder))


def test_an_index_of_a_large_model_is_read(folder: Path) -> None:
    """One of a model with 60 layers of 384 experts has 17 MB."""
    weights = {f"model.layers.{at}.{'x' * 80}.weight": "model-1.safetensors" for at in range(140_000)}
    put(folder / INDEX, weight_map=weights)
    assert load_config(str(folder)).model_type


def test_an_adapter_is_no_model(folder: Path) -> None:
    """transformers would take the base that it names, from anywhere."""
    put(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/else")
    for load in (load_config, load_structure, load_model, load_encoder):
        with pytest.raises(UserError, match="must be a whole model, and holds an adapter"):
            load(str(folder))


def test_attention_of_the_hub_is_not_asked_for(folder: Path) -> None:
    put(folder / "config.json", _attn_implementation="someone/kernel", attn_implementation="someone/kernel")
    assert load_config(str(folder))._attn_implementation is None
    assert load_model(str(folder)).config._attn_implementation == "sdpa"


def test_code_of_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(made)!r}).touch()\nclass Own: pass\n")
    autos = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    put(folder / "config.json", auto_map=autos)
    put(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    load_model(str(folder))
    load_tokenizer(str(folder))
    put(folder / "config.json", model_type="own")
    put(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    for load in (load_config, load_tokenizer):
        with pytest.raises(UserError, match="brings code of its own, and none is run"):
            load(str(folder))
    assert not made.exists()


@pytest.mark.parametrize("size", [10**18, 2**64 - 1])
def test_a_header_of_any_size_is_refused(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    with pytest.raises(UserError, match="header too large"):
        load_model(str(folder))


@pytest.mark.parametrize("template", [ENDLESS, DOUBLING, "{{ 'x' * 2000000 }}", "{{ 2 ** (9 ** 9 ** 9) }}"])
def test_a_template_without_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "CPU_S", 2)
    with pytest.raises(UserError, match="chat template of model: must render two short turns within 2 s of a core"):
        check_template(chat_tokenizer(template=template), model_path="model")


@pytest.mark.parametrize("template", [TEMPLATE, None, "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_ends_is_no_matter_of_this_check(template: str | None) -> None:
    check_template(chat_tokenizer(template=template), model_path="model")
