"""The side path: begins as nothing, is its formula, takes the gradients of plain autograd and keeps less; its file; what it refuses."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from streamrl.errors import UserError
from streamrl.spec.training import Sherl
from streamrl_workers.models.load import load_model, load_structure
from streamrl_workers.models.side_path import SidePath, add_side_path, save_with_side_path, train_side_path
from support.vllm_models import make

SPEC = Sherl.model_validate({"lateLayers": 1, "width": 8})
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _moved(model: PreTrainedModel) -> SidePath:
    """Any weights of the side path."""
    path: SidePath = model.get_decoder().side_path
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return path


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_model_begins_as_it_was(kind: str) -> None:
    model = make(kind, seed=1).eval()
    with torch.no_grad():
        before = model(TOKENS).logits
        train_side_path(model, SPEC)
        assert torch.equal(model(TOKENS).logits, before)
        _moved(model)
        assert not torch.allclose(model(TOKENS).logits, before, atol=1e-3)


def test_a_copy_has_a_path_of_its_own() -> None:
    model = make("llama", seed=1).eval()
    train_side_path(model, SPEC)
    copy = deepcopy(model)
    with torch.no_grad():
        before = copy(TOKENS).logits
        _moved(model)
        assert torch.equal(copy(TOKENS).logits, before)


def test_it_is_its_formula() -> None:
    """Token by token, in plain loops."""
    torch.manual_seed(0)
    path = SidePath(early=3, hidden=6, width=4, like=torch.empty(0, dtype=torch.float64))
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.copy_(torch.randn_like(parameter))
        states = torch.randn(4, 2, 5, 6, dtype=torch.float64)
        for place in range(3):
            assert torch.equal(path.before(place, states[place]), states[place])
        found = path.before(3, states[3])
        shared = 0
        for row in range(2):
            for token in range(5):
                h = states[:, row, token]
                *features, guide = (path.down[i] @ (h[i] / h[i].square().mean().sqrt()) for i in range(4))
                alike = [sum(max(0.0, float(torch.cosine_similarity(f, o, dim=0))) for o in features) for f in features]
                shares = [
                    max(0.0, float(path.attention @ (f * guide))) / c for f, c in zip(features, alike, strict=True)
                ]
                total = sum(shares)
                shared += total > 0
                merged = guide + sum(s / (total or 1.0) * f for s, f in zip(shares, features, strict=True))
                expected = h[3] + path.up @ torch.relu(merged)
                torch.testing.assert_close(found[row, token], expected, rtol=1e-5, atol=1e-5)
    assert shared > 5


def _backward(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and numbers that were kept for them."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if tensor.is_leaf and isinstance(tensor, torch.nn.Parameter) else tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(TOKENS, labels=TOKENS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept


def test_gradients_are_those_of_plain_autograd_and_less_is_kept() -> None:
    plain, thrifty = (make("qwen2", seed=1).double().eval() for _ in range(2))
    add_side_path(plain, SPEC)
    _moved(plain)
    train_side_path(thrifty, SPEC)
    thrifty.load_state_dict(plain.state_dict())
    expected, most = _backward(plain)
    found, kept = _backward(thrifty)
    late = len(plain.model.layers) - 1
    assert found.keys() == {n for n in expected if "side_path" in n or n.startswith(f"model.layers.{late}.")}
    for name, gradient in found.items():
        assert gradient.norm() > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)
    assert kept < 0.8 * most


def test_only_this_loader_takes_its_file(tmp_path: Path) -> None:
    model = make("qwen2", seed=1).eval()
    add_side_path(model, SPEC)
    _moved(model)
    save_with_side_path(model, tmp_path)
    again = load_model(str(tmp_path))
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert load_structure(str(tmp_path)).state_dict().keys() == model.state_dict().keys()
    add_side_path(again, SPEC)  # the same one
    with pytest.raises(UserError, match=r"^spec.trainer.sherl: must be that of the model: lateLayers 1, width 8, got"):
        add_side_path(again, Sherl.model_validate({"lateLayers": 1, "width": 9}))
    with pytest.raises(OSError, match=r"model.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_cannot_carry_it_is_refused() -> None:
    model = make("qwen2", seed=1)
    layers = len(model.model.layers)
    with pytest.raises(UserError, match=rf"^spec.trainer.sherl.lateLayers: must be below the {layers} layers of"):
        add_side_path(model, Sherl.model_validate({"lateLayers": layers}))
    with pytest.raises(UserError, match=r"^spec.trainer.sherl: needs a model of layers one behind the other"):
        add_side_path(GPT2LMHeadModel(GPT2Config(vocab_size=33, n_embd=16, n_layer=2, n_head=2)), SPEC)
