"""Passes that the memory does not hold: measured and cut before, computed in halves, or the line that says what to set."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl_workers.models.documents import Documents
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines import sharding
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.engines.packing import Layout, PackedSample, pack_sample
from streamrl_workers.trainer.engines.pass_memory import PassMemory
from streamrl_workers.trainer.engines.step_metrics import StepMetrics
from streamrl_workers.trainer.engines.training_step import create_training_step
from streamrl_workers.trainer.engines.worker import RankWorker
from support.counted_memory import CountedMemory
from support.tiny_trainer import engine_on, tiny_worker
from support.trainer_groups import make_group, trainer_spec

JOBS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"referenceKl": {"coefficient": 0.1}}},
    "gspo": {"algorithm": {"clipLow": 0.3, "clipHigh": 0.3}},
    "ppo": {"algorithm": {"epochs": 2, "miniBatches": 2, "referenceKl": {}}},
}


ROW = Layout(packed=True, attention_tokens=1000.0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _samples(group: int) -> list[PackedSample]:
    return [one for t in make_group(group).samples for one in pack_sample(t, step=0, attempt=1, advantage=0.5)]


def _gpu_error() -> None:
    raise torch.OutOfMemoryError("injected")


def _python_error() -> None:
    raise MemoryError


def _processor_error() -> None:
    torch.empty(2**50)


def _narrow(
    spec: RLJobSpec, *, rows: int, error: Callable[[], None] = _gpu_error, memory: PassMemory | None = None
) -> RankWorker:
    """A worker whose policy takes at most so many sequences at once."""
    worker = tiny_worker(spec, memory=memory)
    model = worker._model
    wide: Callable[..., Any] = model.forward

    def forward(inputs_BL: torch.Tensor, *, documents: Documents, **rest: Any) -> Any:
        if len(documents.begins) - 1 > rows:
            error()
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


@pytest.mark.parametrize("error", [_gpu_error, _python_error, _processor_error])
@pytest.mark.parametrize("rule", JOBS)
def test_a_step_in_halves_is_the_same_step(
    rule: str, error: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
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
        UserError, match=r"^spec.task.sampling.maxTokens: allows samples .* one of \d+ tokens did not fit alone; lower"
    ):
        worker.accumulate(_samples(1))


def test_a_pass_that_failed_makes_the_next_step_pack_less() -> None:
    spec = trainer_spec()
    worker = _narrow(spec, rows=2)
    assert worker.begin(None) is None
    worker.accumulate(samples := _samples(1))
    assert worker.begin(None) == sum(sample.inputs for sample in samples) // 2


@pytest.fixture
def _sharded() -> Iterator[None]:
    """A process group of one, as with CPU offload."""
    sharding.mesh_of_one(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_sharded")
@pytest.mark.parametrize("method", ["accumulate", "prepare"])
def test_among_shards_the_group_restarts_once_with_half_the_tokens(tmp_path: Path, method: str) -> None:
    """Then the line: a third process would fail like the second. Other settings begin anew."""

    def live(**trainer: Any) -> RankWorker:
        spec = trainer_spec(**trainer)
        return _narrow(spec, rows=2, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))

    first, samples = live(), _samples(1)
    tokens = sum(sample.inputs for sample in samples)
    with pytest.raises(
        RetryError, match=rf"a pass of {tokens} tokens .* restarting with passes of {tokens // 2} tokens"
    ):
        getattr(first, method)(samples)
    second = live()
    assert second.begin(None) == tokens // 2
    with pytest.raises(UserError, match=r"^spec.trainer.microBatchTokens: is more than the memory of rank 0 holds"):
        getattr(second, method)(samples)
    assert live(activationCheckpointing=True).begin(None) is None


@pytest.mark.usefixtures("_sharded")
def test_among_shards_a_sample_alone_is_no_retry(tmp_path: Path) -> None:
    spec = trainer_spec()
    worker = _narrow(spec, rows=0, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))
    with pytest.raises(UserError, match=r"^spec.task.sampling.maxTokens: .* did not fit alone"):
        worker.accumulate(_samples(1)[:1])
    assert not list(tmp_path.iterdir())


def test_other_errors_of_a_pass_stay_what_they_are() -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match=r"^a bug$"):
        _narrow(trainer_spec(), rows=0, error=broken).accumulate(_samples(1))


def _measured(spec: RLJobSpec, memory: CountedMemory) -> RankWorker:
    return tiny_worker(spec, memory=PassMemory(spec=spec, device=memory, run_dir=None))


@pytest.mark.parametrize("rule", JOBS)
def test_passes_that_would_not_fit_are_cut_before(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """Three fifths of the memory that the job's own passes take: the rehearsal measures it, and no pass fails."""
    spec = trainer_spec(rule=rule, **JOBS[rule])
    with CountedMemory() as unlimited:
        expected = _step(_measured(spec, unlimited), spec)
    assert "the memory holds" not in caplog.text
    caplog.clear()
    with CountedMemory(limit_bytes=unlimited.peak_bytes() * 3 // 5) as memory:
        found = _step(_measured(spec, memory), spec)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert "instead of spec.trainer.microBatchTokens (16384)" in caplog.text
    assert "did not fit" not in caplog.text


def test_a_rehearsal_leaves_nothing_behind() -> None:
    spec = trainer_spec(rule="archer")
    with CountedMemory() as memory:
        worker = _measured(spec, memory)
        room = worker.rehearse(40)
    assert room
    assert room > 10**6
    assert not any(gradient.any() for gradient in worker.gradients().values())
    assert not any(worker.measured(None))


def test_a_sample_that_can_never_fit_ends_the_run_before_the_first_step() -> None:
    spec = trainer_spec()
    with CountedMemory() as unlimited:
        worker = _measured(spec, unlimited)
        before = unlimited.used_bytes()
        worker.rehearse(64)
        needed = unlimited.peak_bytes()
    with CountedMemory(limit_bytes=(before + needed) // 2) as memory:
        engine = engine_on(_measured(spec, memory), spec=spec)
        engine.begin_step(0, attempt=1)
        with pytest.raises(UserError, match=r"^spec.task.sampling.maxTokens: .* one of 63 tokens did not fit alone"):
            engine.add([make_group(0)])


class _Rooms:
    """Two ranks that differ in what they hold."""

    size = 2

    def __init__(self, *rooms: int | None) -> None:
        self.rooms = rooms
        self.passed: list[int] = []

    def call(self, method: str, payloads: Any) -> list[Any]:
        """Answer, and count the tokens of passes."""
        if method == "accumulate":
            self.passed += [sum(sample.inputs for sample in batch) for batch in payloads if batch]
        numbers = {"gradient_norm": 0.0, "learning_rate": 0.0, "skipped_nonfinite_steps": 0.0}
        return {"begin": list(self.rooms), "update": [numbers] * 2}.get(method, [None, None])


def test_all_ranks_pack_for_the_one_with_the_least_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    spec = trainer_spec()
    for rooms, most in (((None, None), 16_384), ((400, 60), 60), ((60, None), 60)):
        ranks = _Rooms(*rooms)
        step = create_training_step(create_algorithm(spec), ranks=ranks, spec=spec, layout=ROW)
        step.limit(ranks.call("begin", None))
        for number in range(8):
            step.add(make_group(number))
        step.finish(StepMetrics(step=0))
        assert 0 < max(ranks.passed) <= most
    assert caplog.text.count("instead of spec.trainer.microBatchTokens") == 2
