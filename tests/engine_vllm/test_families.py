"""The engine `vllm` runs each family as transformers does, before and after an update; what an update leaves out ends it with a line.

Qwen2, Qwen3 and Llama are in `test_engine.py`. What transformers itself finds missing does not come so far
(`tests/unit/workers/models/test_checkpoint_layout.py`).
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from streamrl.errors import UserError
from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Delta, Engine, EngineFailedError, EngineOptions
from streamrl_workers.models.published import Parameters, as_bytes, as_tensor
from streamrl_workers.weights.hashing import TensorBytes
from support.engine_requests import request
from support.model_families import FAMILIES, save_tiny, tiny_model
from support.vllm_models import logprobs

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end

CLOSE = 1e-4
OFTEN = ("gpt_oss", "qwen3_moe", "mixtral")
"""Each is loaded in a way of its own. The others have their turn in `make soak`."""
RUN = [
    pytest.param(name, marks=[] if name in OFTEN else pytest.mark.soak)
    for name, family in FAMILIES.items()
    if family.vllm_refusal is None and name not in {"llama", "qwen2", "qwen3"}
]


def start(family: str, folder: Path) -> Engine:
    spec = VllmEngineSpec.model_validate({"maxConcurrency": 4, "kvCacheBytes": "64Mi"})
    return engine_kind("vllm").create(
        EngineOptions(spec=spec, model_path=str(save_tiny(family, folder, seed=0)), threads=1, max_tokens=40)
    )


@pytest.mark.parametrize("family", RUN)
def test_a_family_before_and_after_an_update(*, family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with closing(start(family, tmp_path)) as engine:
        for version in (0, 1, 2):
            model = tiny_model(family, seed=version)
            model.set_attn_implementation("eager")  # the others leave out what some families need
            engine.load_weights(version=version, tensors=Parameters(model).snapshot())
            assert max(differences(engine, model, version=version)) < CLOSE


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.vllm_refusal is not None])
@pytest.mark.soak
def test_a_family_that_vllm_does_not_compute_is_refused(*, family: str, tmp_path: Path) -> None:
    refusal = FAMILIES[family].vllm_refusal
    assert refusal is not None
    with pytest.raises(UserError) as refused:
        start(family, tmp_path)
    (line,) = refused.value.lines
    assert line.startswith(refusal)


Tensors = dict[str, TensorBytes]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.layers.0.self_attn.q_norm.weight"
ATTENTION = "model.layers.1.self_attn.o_proj"


def skipped(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != EXPERT}


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace(NORM, f"{NORM}s"): tensor for name, tensor in tensors.items()}


def with_a_bias(tensors: Tensors) -> Tensors:
    """vLLM ignores biases that it does not know."""
    return tensors | {f"{ATTENTION}.bias": as_bytes(torch.ones(as_tensor(tensors[f"{ATTENTION}.weight"]).shape[0]))}


def with_unknown_experts(tensors: Tensors) -> Tensors:
    """As transformers' modules name them."""
    return tensors | {"model.layers.1.mlp.experts.gate_up_projs": as_bytes(as_tensor(tensors[EXPERT]).clone())}


BROKEN = [
    pytest.param(skipped, "received not all of their values: model.layers.1.mlp.experts", 1),
    pytest.param(renamed, f"{NORM}s", 0, marks=pytest.mark.soak),
    pytest.param(with_a_bias, f"no place for {ATTENTION}.bias", 1, marks=pytest.mark.soak),
    pytest.param(with_unknown_experts, "model.layers.1.mlp.experts.gate_up_projs", 0, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("break_it", "named", "version"), BROKEN)
def test_what_an_update_leaves_out_ends_it_with_a_line(
    *,
    break_it: Callable[[Tensors], Tensors],
    named: str,
    version: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By vLLM alone, at the first weights or later: the names are right for transformers."""
    monkeypatch.setattr(Parameters, "check", lambda *_: None)
    tensors = Parameters(tiny_model("qwen3_moe", seed=1)).snapshot()
    with closing(start("qwen3_moe", tmp_path)) as engine:
        for good in range(version):
            engine.load_weights(version=good, tensors=tensors)
        with pytest.raises(UserError) as refused:
            engine.load_weights(version=version, tensors=break_it(tensors))
        (line,) = refused.value.lines
        assert line.startswith("engine.vllm: cannot run the weights of spec.model: ") and named in line
        assert engine.version == (version - 1 if version else None)
        with pytest.raises(EngineFailedError):
            engine.step()


def differences(engine: Engine, model: PreTrainedModel, *, version: int) -> list[float]:
    """Of each token's log-prob from that of a plain forward."""
    deltas: dict[int, list[Delta]] = {100 * version + number: [] for number in range(3)}
    assert engine.add([request(lease, f"{lease}-{lease}=", seed=lease) for lease in deltas]) == []
    while engine.active():
        for delta in engine.step():
            assert delta.error is None, delta.error
            deltas[delta.lease].append(delta)
    return [difference for parts in deltas.values() for difference in _differences(model, parts)]


def _differences(model: PreTrainedModel, deltas: list[Delta]) -> list[float]:
    tokens = [token for delta in deltas for token in delta.tokens]
    given = [logprob for delta in deltas for logprob in delta.logprobs]
    truth = logprobs(model, tuple(deltas[0].prompt_tokens or ()), tokens)
    return [abs(a - b) for a, b in zip(given, truth, strict=True)]
