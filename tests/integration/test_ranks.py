"""Two ranks of a trainer (FSDP2 over gloo, real processes) against one: the same numbers, the same checkpoints."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from streamrl_workers.models.published import as_tensor
from streamrl_workers.trainer.engines.engine import TrainEngine
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.sharding import has_bf16
from streamrl_workers.trainer.engines.torch_engine import create
from support.model_families import save_tiny
from support.rank0 import act
from support.rank_team import RankTeam, tensors_in
from support.tiny_folder import tiny_folder
from support.trainer_groups import make_group, trainer_spec

pytestmark = pytest.mark.timeout(600)  # every process loads torch: seconds alone, a minute on a busy machine

STEPS = 3
GROUPS = 3
SMALL = {"microBatchTokens": 32}
"""Cuts three groups into several micro-batches; in the last step the first one is a single sample: rank 1 passes a dummy."""
KL = {"referenceKl": {"coefficient": 0.1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("ranks") / "model")


def _one(model: Path, **job: Any) -> TrainEngine:
    return create(EngineSetup(spec=trainer_spec(**job), model_path=str(model), threads=1))


def _steps(engine: TrainEngine, *, first: int = 0, count: int = STEPS) -> list[dict[str, float]]:
    return [act(engine, {"do": "step", "step": step, "groups": GROUPS}) for step in range(first, first + count)]


def check_published(team: RankTeam, gathered: Mapping[str, torch.Tensor], *, holders: int) -> None:
    """What generators get of the ranks is what they hold, bit for bit; each byte is copied once, and none gathered."""
    for step in range(3):  # rank 1 drops what rank 0 drops
        published = team.publish(step)
    manifest, tensors = published.manifest(), published.tensors(of_rank_0=False)
    assert published.collectives == 0
    assert len(manifest.holders) == len(team.ranks) - 1
    assert tensors == published.tensors(of_rank_0=True)
    assert tensors.keys() == gathered.keys()
    for name, tensor in gathered.items():
        assert torch.equal(as_tensor(tensors[name]), tensor), name
    held = Counter[int]()
    for entry in manifest.tensors:
        held.update({one.holder: 0 for one in entry.slices})
        for one in entry.slices:
            held[one.holder] += one.size_bytes
    assert sum(held.values()) == sum(tensor.nbytes for tensor in gathered.values())
    assert held[0] == published.own_bytes
    assert len([size_bytes for size_bytes in held.values() if size_bytes]) == holders
    assert max(held.values()) < 1.5 * sum(held.values()) / holders


@pytest.mark.parametrize(
    ("rule", "job", "only_two"),
    [
        ("grpo", {**SMALL, "optimizer": "Muon", "algorithm": KL}, {}),
        (
            "ppo",
            {**SMALL, "algorithm": {"epochs": 2, "miniBatches": 2, **KL}},
            {"activationCheckpointing": True},
        ),
        ("grpo", {"lora": {"rank": 4}, "algorithm": KL}, {"activationCheckpointing": True}),
        ("ppo", {"sherl": {"lateLayers": 1, "width": 4}, "algorithm": KL}, {"activationCheckpointing": True}),
        pytest.param(
            "archer",
            {**SMALL, "algorithm": {"epochs": 2, "miniBatches": 2, "critic": {"targetRate": 0.5}, **KL}},
            {"activationCheckpointing": True},
            marks=pytest.mark.soak,
        ),
    ],
    ids=["grpo", "ppo", "lora", "sherl", "archer"],
)
def test_two_ranks_equal_one(
    tmp_path: Path, model: Path, rule: str, job: dict[str, Any], only_two: dict[str, Any]
) -> None:
    one = _one(model, rule=rule, **job)
    expected, metrics = _steps(one), []
    with RankTeam(tmp_path / "two", size=2, model=model, rule=rule, **job, **only_two) as team:
        assert team.answer() == "ready"
        metrics, tensors = team.steps(STEPS, groups=GROUPS), team.tensors("two")
        check_published(team, tensors, holders=2)
        measured = team.ask(do="throughput")
        assert 0 < measured["collectives_seconds"] < measured["forward_seconds"] + measured["backward_seconds"]
        assert team.leave() == [0, 0], team.log(1)
        assert "Warning" not in team.log(0)
    for step in range(STEPS):
        assert metrics[step] == pytest.approx(expected[step], rel=1e-4, abs=1e-4), step
    assert expected[-1]["gradient_norm"] > 0
    (tmp_path / "one").mkdir()
    for name, tensor in tensors_in(tmp_path / "one", act(one, {"do": "tensors", "folder": tmp_path / "one"})).items():
        torch.testing.assert_close(tensors.pop(name), tensor, rtol=1e-4, atol=1e-4)
    assert not tensors


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_two_replicas_equal_one_rank(tmp_path: Path, model: Path, size: int) -> None:
    job = {**SMALL, "gradientClipNorm": 0.05}
    one, again = _one(model, **job), _one(model, **job)
    expected = _steps(one)
    layout = {"processesPerNode": size, "parallelism": {"replicate": 2}}
    with RankTeam(tmp_path / "team", size=size, model=model, **job, **layout) as team:
        assert team.answer() == "ready"
        metrics, tensors = team.steps(STEPS, groups=GROUPS), team.tensors("weights")
        check_published(team, tensors, holders=size // 2)
        team.ask(do="save", folder=str(tmp_path / "saved"))
        later = team.steps(1, first=STEPS, groups=GROUPS)
        assert team.leave() == [0] * size, team.log(1)
    for step in range(STEPS):
        assert metrics[step] == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step
    assert all(step["gradient_norm"] > 2 * job["gradientClipNorm"] for step in metrics)
    for name, tensor in _weights(one, tmp_path / "one").items():
        torch.testing.assert_close(tensors.pop(name), tensor, rtol=1e-5, atol=1e-5)
    assert not tensors
    act(again, {"do": "load", "folder": str(tmp_path / "saved")})
    assert _steps(again, first=STEPS, count=1) == [pytest.approx(later[0], rel=1e-5, abs=1e-5)]


def _weights(engine: TrainEngine, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    return tensors_in(folder, act(engine, {"do": "tensors", "folder": folder}))


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_checkpoints_move_between_replicas_and_shards_bit_for_bit(
    tmp_path: Path, model: Path, before: int, after: int
) -> None:
    saved = []
    for number, replicas in enumerate((before, after)):
        layout = {"processesPerNode": 2, "parallelism": {"replicate": replicas}}
        with RankTeam(tmp_path / f"team-{number}", size=2, model=model, rule="ppo", **layout) as team:
            assert team.answer() == "ready"
            if saved:
                team.ask(do="load", folder=str(saved[-1]))
            else:
                team.steps(1, groups=GROUPS)
            saved.append(tmp_path / f"saved-{number}")
            team.ask(do="save", folder=str(saved[-1]))
            team.steps(1, first=1, groups=GROUPS)
            assert team.leave() == [0, 0], team.log(1)
        one = _one(model, rule="ppo")
        act(one, {"do": "load", "folder": str(saved[-1])})
        act(one, {"do": "save", "folder": str(tmp_path / f"whole-{number}")})
    first, second = (_state(tmp_path / f"whole-{number}") for number in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.soak
@pytest.mark.parametrize("family", ["tied", "qwen3_moe"])
def test_four_ranks_equal_one(tmp_path: Path, model: Path, family: str) -> None:
    folder = model if family == "tied" else save_tiny(family, tmp_path / "model", vocab_size=32)  # as groups have
    job: dict[str, Any] = {**SMALL, "algorithm": KL}
    one = _one(folder, **job)
    expected = _steps(one)
    with RankTeam(tmp_path / "four", size=4, model=folder, **job) as team:
        assert team.answer() == "ready"
        metrics, tensors = team.steps(STEPS, groups=GROUPS), team.tensors("four")
        assert team.leave() == [0] * 4, team.log(1)
    for step in range(STEPS):
        assert metrics[step] == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step
    (tmp_path / "one").mkdir()
    for name, tensor in tensors_in(tmp_path / "one", act(one, {"do": "tensors", "folder": tmp_path / "one"})).items():
        torch.testing.assert_close(tensors.pop(name), tensor, rtol=1e-5, atol=1e-5)
    assert not tensors


@pytest.mark.soak
@pytest.mark.parametrize(("family", "size"), [("tied", 4), ("qwen3_moe", 2), ("qwen3_moe", 4)])
def test_ranks_publish_what_they_hold(tmp_path: Path, model: Path, family: str, size: int) -> None:
    folder = model if family == "tied" else save_tiny(family, tmp_path / "model")
    with RankTeam(tmp_path / "run", size=size, model=folder) as team:
        assert team.answer() == "ready"
        check_published(team, team.tensors("gathered"), holders=size)
        assert team.leave() == [0] * size, team.log(1)


def test_two_ranks_with_cpu_offload_equal_one(tmp_path: Path, model: Path) -> None:
    one = _one(model, **SMALL)
    expected = _steps(one)
    with RankTeam(tmp_path / "two", size=2, model=model, cpuOffload=True, **SMALL) as team:
        assert team.answer() == "ready"
        metrics, tensors = team.steps(STEPS, groups=GROUPS), team.tensors("two")
        assert team.leave() == [0, 0], team.log(1)
    assert metrics[-1] == pytest.approx(expected[-1], rel=1e-4, abs=1e-4)
    (tmp_path / "one").mkdir()
    for name, tensor in tensors_in(tmp_path / "one", act(one, {"do": "tensors", "folder": tmp_path / "one"})).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # looks at the blocks' inputs
@pytest.mark.timeout(1800)  # half a minute of compiling on a core of its own
def test_compiled_blocks_compute_the_same(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = (_one(model, activationCheckpointing=True, compile=compile_it) for compile_it in (False, True))
    before = counters["stats"]["unique_graphs"]
    for step in range(2):
        metrics = []
        for engine in (plain, compiled):
            engine.begin_step(step, attempt=1)
            engine.add([make_group(number) for number in range(GROUPS)])
            metrics.append(engine.finish_step())
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)
    assert counters["stats"]["unique_graphs"] > before  # or nothing was compiled
    expected, found = plain.tensors(), compiled.tensors()
    for name, tensor in expected.items():
        numbers = [torch.frombuffer(bytearray(part.data), dtype=torch.float32) for part in (found[name], tensor)]
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduced", ["FP32", "BF16"])
def test_two_ranks_in_bf16_publish_what_one_does_up_to_its_rounding(reduced: str, tmp_path: Path, model: Path) -> None:
    unclipped = {"algorithm": {"clipLow": 0.99, "clipHigh": 10.0}, "correction": {"twoSidedClip": {"cap": 1000}}}
    job: dict[str, Any] = {
        "precision": "BF16",
        "reduceDtype": reduced,
        **unclipped,
    }  # rounding moves tokens over a clip's edge
    if not has_bf16(torch.device("cpu")):
        with RankTeam(tmp_path / "two", size=2, model=model, **job) as team:
            assert team.wait(0) == 2
            assert team.log(0).splitlines()[-1].startswith("spec.trainer.precision: must be FP32 on hardware without")
            assert team.wait(1) == 0
        return
    one = _one(model, **job)
    expected = _steps(one, count=1)[0]
    torch.distributed.destroy_process_group()  # of one
    with RankTeam(tmp_path / "two", size=2, model=model, **job) as team:
        assert team.answer() == "ready"
        measured, tensors = team.steps(1, groups=GROUPS)[0], team.tensors("two")
        assert team.leave() == [0, 0], team.log(1)
    assert measured["loss"] == pytest.approx(expected["loss"], rel=0.1)
    assert measured["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=0.1)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def _state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that one rank has saved."""
    return {
        str(path.relative_to(folder)) + name: tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_checkpoints_move_between_one_and_two_ranks_bit_for_bit(tmp_path: Path, model: Path) -> None:
    job: dict[str, Any] = {"rule": "ppo", "schedule": "Cosine", "steps": 10, "optimizer": "Muon"}
    one, again = _one(model, **job), _one(model, **job)
    _steps(one, count=2)
    folders = {name: str(tmp_path / name) for name in ("one", "two", "later", "export", "back", "forth")}
    act(one, {"do": "save", "folder": folders["one"]})
    with RankTeam(tmp_path / "run", size=2, model=model, **job) as team:
        assert team.answer() == "ready"
        team.ask(do="load", folder=folders["one"])
        team.ask(do="save", folder=folders["two"])
        team.steps(1, first=2, groups=GROUPS)
        team.ask(do="save", folder=folders["later"])
        team.ask(do="export", folder=folders["export"])
        published = team.tensors("published")
        assert team.leave() == [0, 0], team.log(1)
    assert len(list((tmp_path / "two").glob("rank-*.safetensors"))) == 2
    act(again, {"do": "load", "folder": folders["two"]})
    act(again, {"do": "save", "folder": folders["back"]})
    before, after = _state(tmp_path / "one"), _state(tmp_path / "back")
    assert before.keys() == after.keys()
    assert len(before) > 60
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    act(again, {"do": "load", "folder": folders["later"]})
    (tmp_path / "weights").mkdir()
    loaded = tensors_in(tmp_path / "weights", act(again, {"do": "tensors", "folder": tmp_path / "weights"}))
    exported = AutoModelForCausalLM.from_pretrained(folders["export"]).state_dict()
    for name, tensor in published.items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(exported[name], tensor), name
