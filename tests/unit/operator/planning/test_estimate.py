"""What a job will need and cost."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from streamrl.spec import parse_job
from streamrl_operator.planning.estimate import estimate, find_config, of_config
from support.jobs import simulated_job
from support.planned import full_document, full_job
from support.supervised_jobs import supervised_job

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN25_05B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
}
GIB = 1 << 30


def rank_bytes(*, algorithm: dict[str, Any] | None = None, **trainer: Any) -> int:
    """Of a rank of the full job with these changes."""
    document = full_document()
    document["spec"]["trainer"] |= {"pod": {}} | trainer
    if algorithm is not None:
        document["spec"]["algorithm"] = algorithm
    found = estimate(parse_job(document), config=QWEN3_8B).bytes_per_rank
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(QWEN3_8B, 8_190_735_360), (QWEN25_05B, 494_032_768), (QWEN3_30B_A3B, 30_532_122_624)],
    ids=["Qwen3-8B", "Qwen2.5-0.5B", "Qwen3-30B-A3B"],
)
def test_parameters_are_those_of_the_hub(config: dict[str, Any], parameters: int) -> None:
    architecture = of_config(config)
    assert architecture is not None
    assert architecture.parameters == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize(
    "config", [{}, {"n_embd": 768}, QWEN3_8B | {"hidden_size": None}, QWEN25_05B | {"num_attention_heads": 0}]
)
def test_another_kind_of_model_is_unknown(config: dict[str, Any]) -> None:
    assert of_config(config) is None
    found = estimate(full_job(), config=config)
    assert (found.parameters, found.bytes_per_rank, found.pools[0].bytes_per_replica) == (None, None, None)
    assert "unknown" in found.lines()[0]


def test_memory_of_a_rank_is_more_than_its_share_and_less_than_all() -> None:
    one, two, eight = (rank_bytes(processesPerNode=ranks) for ranks in (1, 2, 8))
    states = (16 + 2 * 4) * 8_190_735_360  # weights, gradients, two moments in float32; two published versions
    assert one > states
    assert two - eight == pytest.approx(states * (1 / 2 - 1 / 8), rel=0.02)  # and rows of the head
    assert one > two > one - states / 2  # what is shared is gathered layer by layer
    assert rank_bytes(processesPerNode=8, parallelism={"replicate": 4}) == two


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"precision": "BF16"}, {"precision": "FP32"}),
        ({"activationCheckpointing": True}, {"activationCheckpointing": False}),
        ({"microBatchTokens": 1024}, {"microBatchTokens": 16384}),
        ({"lora": {"rank": 16}}, {}),
        ({"lora": {"rank": 4}}, {"lora": {"rank": 64}}),
        ({"sherl": {"lateLayers": 2}}, {"sherl": {"lateLayers": 4}}),
        ({"sherl": {"lateLayers": 4}}, {"lora": {"rank": 4}}),  # activations, not states
    ],
)
def test_what_saves_memory_saves_memory(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert rank_bytes(**less) < rank_bytes(**more)


def test_cpu_offload_moves_states_from_the_device_to_the_process() -> None:
    document = full_document()
    document["spec"]["trainer"] |= {"processesPerNode": 2}
    plain = estimate(parse_job(document), config=QWEN3_8B)
    document["spec"]["trainer"]["cpuOffload"] = True
    offloaded = estimate(parse_job(document), config=QWEN3_8B)
    assert plain.bytes_per_rank == offloaded.bytes_per_rank
    assert plain.device_bytes_per_rank is not None
    assert offloaded.device_bytes_per_rank is not None
    states = 16 * 8_190_735_360 / 2
    assert plain.device_bytes_per_rank - offloaded.device_bytes_per_rank == pytest.approx(states, rel=0.001)


def test_critic_and_reference_need_their_own() -> None:
    kinds = ({"grpo": {}}, {"grpo": {"referenceKl": {}}}, {"ppo": {}})
    plain, reference, critic = (rank_bytes(algorithm=kind, processesPerNode=1) for kind in kinds)
    assert reference - plain == pytest.approx(4 * 8.19e9, rel=0.01)
    assert critic - plain == pytest.approx(16 * 8.19e9, rel=0.01)


def test_a_critic_of_logs_has_a_copy() -> None:
    kinds: list[dict[str, Any]] = [{}, {"weights": {"advantage": {}}}, {"weights": {"critic": {}}}]
    jobs = [parse_job(supervised_job(rewardField="reward", **kind)) for kind in kinds]
    plain, weighed, critic = (estimate(job, config=QWEN3_8B).bytes_per_rank or 0 for job in jobs)
    assert plain == weighed
    assert critic - plain == pytest.approx(20 * 8.19e9, rel=0.01)


def test_a_device_holds_all_but_the_process_and_what_is_published() -> None:
    found = estimate(full_job(), config=QWEN3_8B)
    assert found.bytes_per_rank is not None
    assert found.device_bytes_per_rank is not None
    published = 2 * 2 * 8_190_735_360 // found.ranks
    assert found.bytes_per_rank - found.device_bytes_per_rank == pytest.approx(GIB + published, rel=0.001)


def test_a_generator_holds_two_versions_and_its_cache() -> None:
    (pool, *_) = estimate(full_job(), config=QWEN3_8B).pools
    assert pool.bytes_per_replica is not None
    cache = 8 * (64 + 1024) * 2 * 36 * 8 * 128 * 2  # slots x tokens x keys and values of all layers in bfloat16
    assert pool.bytes_per_replica == pytest.approx(GIB + 2 * 2 * 8_190_735_360 + cache, rel=0.001)


@pytest.mark.parametrize(("part", "value"), [("trainer", {"lora": {}}), ("weights", {"http": {"deltas": True}})])
def test_a_generator_holds_the_base_of_adapters_or_of_deltas(part: str, value: dict[str, Any]) -> None:
    document = full_document()
    document["spec"][part] = document["spec"].get(part, {}) | value
    adapted, whole = (estimate(job, config=QWEN3_8B).pools[0] for job in (parse_job(document), full_job()))
    assert adapted.bytes_per_replica is not None
    assert whole.bytes_per_replica is not None
    assert adapted.bytes_per_replica - whole.bytes_per_replica == pytest.approx(2 * 8_190_735_360, rel=0.001)


def test_money() -> None:
    found = estimate(full_job())
    assert [pool.cost_per_hour for pool in found.pools] == [
        (Decimal("7.50"), Decimal("7.50")),
        (Decimal("1.00"), Decimal("5.00")),
        (Decimal("2.00"), Decimal("2.00")),
    ]
    assert found.cost_per_hour == (Decimal("20.50"), Decimal("24.50"))


def test_lines_for_people() -> None:
    assert estimate(full_job(), config=QWEN3_8B).lines()[2:] == [
        "pool fixed: 3 generators, about 32.7 GiB each, 7.50 an hour",
        "pool auto: 1 to 5 generators, about 32.7 GiB each, 1.00 to 5.00 an hour",
        "pool free: 2 generators, about 32.7 GiB each, 2.00 an hour",
        "all together: 20.50 to 24.50 an hour",
    ]


def test_the_size_of_a_new_model_is_computed() -> None:
    document = full_document()
    document["spec"]["model"] = {"scratch": {"hiddenSize": 96, "layers": 2, "heads": 4, "intermediateSize": 256}}
    found = estimate(parse_job(document))
    assert found.parameters == pytest.approx(225_000, rel=0.05)  # the README's model, whose alphabet is smaller


def test_a_simulated_job_has_no_model() -> None:
    found = estimate(parse_job(simulated_job()))
    assert found.lines()[0] == "model: none, the run is simulated"
    assert "unknown" not in "".join(found.lines())


def test_a_config_is_found_on_this_machine(tmp_path: Path) -> None:
    model = full_job().spec.model
    assert find_config(model, base_dir=tmp_path, hub_dir=tmp_path) is None
    repository = tmp_path / "models--Qwen--Qwen3-8B"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc\n")
    (repository / "snapshots/abc/config.json").write_text(json.dumps(QWEN3_8B))
    assert find_config(model, base_dir=tmp_path, hub_dir=tmp_path) == QWEN3_8B
    outside = full_document()
    outside["spec"]["model"]["huggingFace"]["revision"] = "../../models--Qwen--Qwen3-8B/refs/main"
    assert find_config(parse_job(outside).spec.model, base_dir=tmp_path, hub_dir=tmp_path) is None
    (repository / "snapshots/abc/config.json").write_text("[")
    assert find_config(model, base_dir=tmp_path, hub_dir=tmp_path) is None


def test_a_config_beside_the_job_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(QWEN25_05B))
    document = full_document()
    document["spec"]["model"] = {"path": {"directory": "mine"}}
    model = parse_job(document).spec.model
    assert find_config(model, base_dir=tmp_path, hub_dir=tmp_path / "none") == QWEN25_05B
