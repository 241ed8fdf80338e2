"""What a rank says of its memory before it loads a model."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.memory import RankMemory, rank_memory
from streamrl_workers.models.free_memory import free_bytes
from streamrl_workers.models.load import load_model
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines import memory
from streamrl_workers.trainer.engines.torch_engine import build_models
from support.tiny_folder import tiny_folder
from support.trainer_groups import trainer_spec

CPU = torch.device("cpu")
GIB = 2**30
NEED = RankMemory(
    parameters=GIB, gradients=GIB, optimiser=2 * GIB, gathered=0, logits=GIB, publishing=GIB, activations=3 * GIB
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "model")


def test_sizes_are_those_of_the_model(model: Path) -> None:
    found = memory.sizes_of(str(model), trainer=trainer_spec().trainer)
    loaded = load_model(str(model))
    assert found.parameters == found.trained == sum(p.numel() for p in loaded.parameters())
    assert found.embeddings == 33 * 16  # tied: once
    assert (found.vocabulary, found.hidden, found.feed_forward, found.layers) == (33, 16, 36, 2)


@pytest.mark.parametrize("tuning", [{"lora": {"rank": 4}}, {"sherl": {"lateLayers": 1, "width": 4}}])
def test_what_is_trained_is_counted(model: Path, tuning: dict[str, Any]) -> None:
    spec = trainer_spec(**tuning)
    found = memory.sizes_of(str(model), trainer=spec.trainer)
    built = build_models(spec, model_path=str(model), device=CPU).model
    assert found.trained == sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert found.parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    ("free", "part"), [(GIB // 2, "parameters"), (3 * GIB // 2, "gradients"), (3 * GIB, "optimiser")]
)
def test_what_lasts_and_does_not_fit_is_refused_in_a_line(free: int, part: str) -> None:
    with pytest.raises(UserError) as refused:
        memory.complain(NEED, free=free, device="cuda:0")
    (line,) = refused.value.lines
    assert f"its {part} do not fit (parameters 1.0 GiB, gradients 1.0 GiB, optimiser 2.0 GiB, logits" in line
    assert line.startswith("spec.trainer: needs more memory than cuda:0 has free (")
    assert line.endswith("; raise spec.trainer.processesPerNode or nodes, or set spec.trainer.lora")


@pytest.mark.parametrize(
    ("free", "told"),
    [
        (5 * GIB, "publishing may not fit the 5.0 GiB free on cuda:0; if so, raise spec.trainer.processesPerNode"),
        (7 * GIB, "activations may not fit the 7.0 GiB free on cuda:0; if so, lower spec.trainer.microBatchTokens"),
        (9 * GIB, ""),
    ],
)
def test_what_may_not_fit_is_warned_of(caplog: pytest.LogCaptureFixture, free: int, told: str) -> None:
    memory.complain(NEED, free=free, device="cuda:0")
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


@pytest.mark.parametrize(
    ("main", "gpu", "told"),
    [
        (0, GIB, "needs more memory than main memory has free (0.0 GiB): its parameters do not fit"),
        (GIB, 0, "its gathered may not fit the 0.0 GiB free on cuda"),
    ],
)
def test_with_cpu_offload_both_memories_are_looked_at(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, model: Path, main: int, gpu: int, told: str
) -> None:
    free = {"cpu": main, "cuda": gpu}
    monkeypatch.setattr(memory, "free_bytes", lambda device, *, ranks: free[device.type])
    spec = trainer_spec(cpuOffload=True)
    said = ""
    try:
        memory.check_memory(str(model), spec=spec, algorithm=create_algorithm(spec), device=torch.device("cuda"))
    except UserError as error:
        said = str(error)
    assert told in said + caplog.text


def test_the_estimate_is_in_the_log_before_the_model_is_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free_bytes", lambda device, *, ranks: 0)
    with pytest.raises(UserError, match="its parameters do not fit"):
        build_models(trainer_spec(), model_path=str(model), device=CPU)
    assert "memory of a rank, about: parameters 0.0 GiB" in caplog.text
    assert "free on cpu: 0.0 GiB" in caplog.text


def test_free_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {8 * 2**20} kB\n")
    assert free_bytes(CPU, ranks=2, root=tmp_path) == 4 * GIB
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    assert free_bytes(CPU, ranks=2, root=tmp_path) == GIB
    (group / "memory.max").write_text("max\n")
    assert free_bytes(CPU, ranks=1, root=tmp_path) == 8 * GIB
    assert free_bytes(CPU, ranks=1, root=tmp_path / "none") > 2**60


def test_the_formula_counts_what_adamw_holds(model: Path) -> None:
    spec = trainer_spec()
    sizes = memory.sizes_of(str(model), trainer=spec.trainer)
    found = rank_memory(sizes, trainer=spec.trainer, task=spec.task, frozen_parameters=0, critic=False)
    loaded = load_model(str(model))
    adamw = torch.optim.AdamW(loaded.parameters())
    loaded(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    adamw.step()
    parameters = list(loaded.parameters())
    moments = [state[key] for state in adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert found.parameters == sum(p.nbytes for p in parameters)
    assert found.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    assert found.optimiser == sum(moment.nbytes for moment in moments)
