"""How well a step used its devices: FLOPs by the model's configuration, peaks by the device's name, padding and time by part."""

import time

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.step_lines import TRAINER_NUMBERS
from streamrl_workers.trainer.engines.packing import rehearsal_sample
from streamrl_workers.trainer.engines.throughput import PARTS, ModelFlops, peak_flops, throughput_metrics
from support.tiny_trainer import tiny_engine, tiny_model
from support.trainer_groups import make_group, trainer_spec

TERA = 1e12


@pytest.mark.parametrize(
    ("name", "product", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("a device of tomorrow", "bf16", 0.0),
    ],
)
def test_peaks_by_name(name: str, product: str, peak: float) -> None:
    assert peak_flops(name, product=product) == pytest.approx(peak * TERA)


def _numel(model: PreTrainedModel, part: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if part in name)


def test_flops_are_six_for_each_weight_and_attention_s_term() -> None:
    model, sample = tiny_model(), rehearsal_sample(11)  # 10 inputs, 10 of them trained
    attention = 12 * 2 * 2 * 8 * 10**2
    assert ModelFlops(model).of(sample) == 6 * _numel(model) * 10 + attention  # tied embeddings are the head
    model.requires_grad_(requires_grad=False)
    assert ModelFlops(model).of(sample) == 4 * _numel(model) * 10 + attention


def test_of_experts_those_count_that_a_token_passes() -> None:
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    experts, lookup = _numel(model, ".experts."), _numel(model, "embed_tokens")
    assert experts == 2 * 8 * 3 * 16 * 8
    active = _numel(model) - lookup - experts * 3 // 4
    assert ModelFlops(model).of(rehearsal_sample(2)) == 6 * active + 12 * 2 * 2 * 8


def test_utilisation_is_of_all_ranks() -> None:
    one = {"tokens": 600.0, "places": 800.0, "flops": 3e15, "peak": 1e15, **{f"{part}_seconds": 1.0 for part in PARTS}}
    other = {**one, "tokens": 200.0, "places": 800.0, "flops": 1e15, "forward_seconds": 3.0}
    found = throughput_metrics([one, other], busy_s=4.0)
    assert found == {
        "mfu": 0.5,
        "tokens_per_second": 200.0,
        "padding_share": 0.5,
        **{f"{part}_seconds": 1.0 for part in PARTS},
        "forward_seconds": 2.0,
    }
    unknown = throughput_metrics([one, {**other, "peak": 0.0}], busy_s=4.0)
    assert (unknown["mfu"], unknown["tokens_per_second"]) == (0.0, 200.0)


@pytest.mark.parametrize("rule", ["grpo", "ppo"])
def test_a_step_is_measured(rule: str) -> None:
    torch.set_num_threads(1)
    engine = tiny_engine(trainer_spec(rule=rule))
    begun_s = time.perf_counter()
    engine.begin_step(0, attempt=1)
    engine.add([make_group(number) for number in range(3)])
    engine.finish_step()
    found, wall_s = engine.throughput(), time.perf_counter() - begun_s
    assert found.keys() <= TRAINER_NUMBERS.keys()
    assert found["padding_share"] == 0  # documents of a row
    assert found["tokens_per_second"] > 0
    assert found["mfu"] == 0  # a processor has no peak in the table
    assert found["collectives_seconds"] == 0  # of shards alone
    assert all(found[f"{part}_seconds"] > 0 for part in PARTS if part != "collectives")
    assert sum(found[f"{part}_seconds"] for part in PARTS) <= wall_s
    engine.begin_step(1, attempt=1)
    assert set(engine.throughput().values()) == {0.0}
