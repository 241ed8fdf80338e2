"""A micro-step for which the memory does not suffice is computed in halves: the same gradients, the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl_workers.models.documents import Documents
from streamrl_workers.trainer.engines import worker as worker_module
from streamrl_workers.trainer.engines.packing import PackedSample, pack_sample
from streamrl_workers.trainer.engines.worker import RankWorker
from support.tiny_trainer import engine_on, tiny_worker
from support.trainer_groups import make_group, trainer_spec

JOBS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"referenceKl": {"coefficient": 0.1}}},
    "gspo": {"algorithm": {"clipLow": 0.3, "clipHigh": 0.3}},
    "ppo": {"algorithm": {"epochs": 2, "miniBatches": 2, "referenceKl": {}}},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _samples(group: int) -> list[PackedSample]:
    return [one for t in make_group(group).samples for one in pack_sample(t, step=0, attempt=1, advantage=0.5)]


def _narrow(spec: RLJobSpec, *, rows: int, error: type[Exception] = torch.OutOfMemoryError) -> RankWorker:
    """A worker whose policy takes at most `rows` sequences at once."""
    worker = tiny_worker(spec)
    model = worker._model
    wide: Callable[..., Any] = model.forward

    def forward(inputs_BL: torch.Tensor, *, documents: Documents, **rest: Any) -> Any:
        if len(documents.begins) - 1 > rows:
            raise error("injected")
        return wide(inputs_BL, documents=documents, **rest)

    model.forward = forward
    return worker


def _step(worker: RankWorker, spec: RLJobSpec) -> dict[str, float]:
    engine = engine_on(worker, spec=spec)
    engine.begin_step(0, attempt=1)
    engine.add([make_group(number) for number in range(3)])
    return engine.finish_step()


def _same_gradients(found: RankWorker, expected: RankWorker) -> None:
    gradients = found.gradients()
    for name, gradient in expected.gradients().items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("rule", JOBS)
def test_a_step_in_halves_is_the_same_step(rule: str, error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    spec = trainer_spec(rule=rule, **JOBS[rule])
    whole, narrow = tiny_worker(spec), _narrow(spec, rows=3, error=error)
    expected = _step(whole, spec)
    assert "did not fit" not in caplog.text
    assert _step(narrow, spec) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert "samples) did not fit the memory: computed in two; lower spec.trainer.micro" in caplog.text
    _same_gradients(narrow, whole)


@pytest.mark.parametrize("rule", ["grpo", "ppo"])
def test_half_a_backward_pass_leaves_nothing_behind(rule: str) -> None:
    """The head's gradient is added before the first layer's: there the memory ends, once, in the second micro-step."""
    spec = trainer_spec(rule=rule, **JOBS[rule])
    whole, broken = tiny_worker(spec), tiny_worker(spec)
    layer = broken._model.get_parameter("model.layers.0.mlp.up_proj.weight")
    passes: list[int] = []

    def end_of_memory(gradient: torch.Tensor) -> None:
        passes.append(len(passes))
        if len(passes) == 2:
            raise torch.OutOfMemoryError("injected")

    layer.register_hook(end_of_memory)
    for worker in (whole, broken):
        for group in (1, 2, 3):
            worker.accumulate(_prepared(worker, _samples(group)))
    assert len(passes) == 6  # the first, the broken one, the first again, two halves, the third
    _same_gradients(broken, whole)
    assert broken.measured(None) == pytest.approx(whole.measured(None), rel=1e-5, abs=1e-5)


def _prepared(worker: RankWorker, samples: list[PackedSample]) -> list[PackedSample]:
    ready = [replace(sample, **found) for sample, found in zip(samples, worker.prepare(samples), strict=True)]
    return [replace(sample, returns_N=sample.advantages_N) for sample in ready] if worker._critic else ready


def test_gradients_that_no_backward_pass_has_touched_are_kept() -> None:
    spec = trainer_spec()
    worker = _narrow(spec, rows=2)
    passes: list[int] = []
    worker._model.get_parameter("model.layers.0.mlp.up_proj.weight").register_hook(lambda _: passes.append(1))
    worker.accumulate(_samples(1)[:2])
    worker.accumulate(_samples(2))
    assert len(passes) == 3  # one, and two halves


def test_a_sample_that_does_not_fit_alone_is_the_users_error() -> None:
    worker = _narrow(trainer_spec(), rows=0)
    with pytest.raises(
        UserError,
        match=r"^spec.trainer.microBatchTokens: is more than the memory holds: a pass of \d+ tokens \(1 samples",
    ):
        worker.accumulate(_samples(1))


def test_several_ranks_end_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "sharded", lambda: True)
    worker = _narrow(trainer_spec(), rows=2)
    with pytest.raises(
        UserError, match=r"did not fit, and none is cut with several ranks or cpuOffload; lower it, or set"
    ):
        worker.accumulate(_samples(1))
    with pytest.raises(UserError, match=r"none is cut with several ranks"):
        worker.prepare(_samples(1))
