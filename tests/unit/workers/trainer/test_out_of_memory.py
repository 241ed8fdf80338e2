"""Passes that the memory does not hold: measured and cut before, computed in halves, or the line that says what to set."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.models.documents import attend_by_document
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines import sharding
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.engines.expert_parallel import stacks_of
from streamrl_workers.trainer.engines.packing import Layout, PackedSample, pack_sample, rehearsal_sample
from streamrl_workers.trainer.engines.pass_memory import PassMemory
from streamrl_workers.trainer.engines.step_metrics import StepMetrics
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.trainer.engines.training_step import create_training_step
from streamrl_workers.trainer.engines.worker import RankModels, RankWorker
from streamrl_workers.weights.hashing import tensors_hash
from support.counted_memory import CountedMemory
from support.model_families import tiny_model as family_model
from support.tiny_trainer import engine_on, gpu_error, narrow_worker, tiny_tokenizer, tiny_worker, train_steps
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


def _python_error() -> None:
    raise MemoryError


def _processor_error() -> None:
    torch.empty(2**50)


def _step(worker: RankWorker, spec: RLJobSpec) -> dict[str, float]:
    engine = engine_on(worker, spec=spec)
    engine.begin_step(0, attempt=1)
    engine.add([make_group(number) for number in range(3)])
    return engine.finish_step()


def _same_gradients(found: RankWorker, expected: RankWorker) -> None:
    gradients = found.gradients()
    for name, gradient in expected.gradients().items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [gpu_error, _python_error, _processor_error])
@pytest.mark.parametrize("rule", JOBS)
def test_a_step_in_halves_is_the_same_step(
    rule: str, error: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    spec = trainer_spec(rule=rule, **JOBS[rule])
    whole, narrow = tiny_worker(spec), narrow_worker(spec, rows=3, error=error)
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
    worker = narrow_worker(spec, rows=2)
    passes: list[int] = []
    worker._model.get_parameter("model.layers.0.mlp.up_proj.weight").register_hook(lambda _: passes.append(1))
    worker.accumulate(_samples(1)[:2])
    worker.accumulate(_samples(2))
    assert len(passes) == 3  # one, and two halves


def test_a_sample_that_does_not_fit_alone_is_the_users_error() -> None:
    worker = narrow_worker(trainer_spec(), rows=0)
    with pytest.raises(
        UserError, match=r"^spec.task.sampling.maxTokens: allows samples .* one of \d+ tokens did not fit alone; lower"
    ):
        worker.accumulate(_samples(1))


def test_a_pass_that_failed_makes_the_next_step_pack_less() -> None:
    spec = trainer_spec()
    worker = narrow_worker(spec, rows=2)
    assert worker.begin(None) is None
    worker.accumulate(samples := _samples(1))
    assert worker.begin(None) == sum(sample.inputs for sample in samples) // 2


STEPS = [[make_group(10 * step + number, step=step) for number in range(3)] for step in range(3)]


def _hash_of_repeated(engine: TorchEngine, cuts: Sequence[pb.PassCuts | None]) -> bytes:
    for step, (groups, cut) in enumerate(zip(STEPS, cuts, strict=True)):
        engine.begin_step(step, attempt=2, cuts=cut)
        engine.add(groups)
        engine.finish_step()
    return tensors_hash(engine.tensors())


def _kept(spec: RLJobSpec, folder: Path) -> PassMemory:
    """The memory of a rank whose group has restarted."""
    with pytest.raises(RetryError):
        narrow_worker(spec, rows=2, memory=PassMemory(spec=spec, device=None, run_dir=folder)).accumulate(_samples(1))
    return PassMemory(spec=spec, device=None, run_dir=folder)


@pytest.mark.usefixtures("_sharded")
@pytest.mark.parametrize("rule", ["grpo", "ppo"])
def test_a_step_under_a_kept_limit_is_repeated_bit_for_bit(rule: str, tmp_path: Path) -> None:
    spec = trainer_spec(rule=rule, **JOBS[rule])
    cuts, trained = _trained(engine_on(tiny_worker(spec, memory=_kept(spec, tmp_path)), spec=spec))
    assert cuts[0].room_tokens
    _assert_repeats(spec, cuts, expected=trained)


@pytest.mark.parametrize("rule", JOBS)
def test_a_step_in_halves_is_repeated_bit_for_bit(rule: str) -> None:
    spec = trainer_spec(rule=rule, **JOBS[rule])
    cuts, trained = _trained(engine_on(narrow_worker(spec, rows=3), spec=spec))
    assert cuts[0].halved
    assert cuts[-1].room_tokens
    _assert_repeats(spec, cuts, expected=trained)


@pytest.mark.parametrize("rule", ["grpo", "ppo"])
def test_a_step_for_the_measured_room_is_repeated_bit_for_bit(rule: str) -> None:
    spec = trainer_spec(rule=rule, **JOBS[rule])
    with CountedMemory() as unlimited:
        _step(_measured(spec, unlimited), spec)
    with CountedMemory(limit_bytes=unlimited.peak_bytes() * 3 // 5) as memory:
        cuts, trained = _trained(engine_on(_measured(spec, memory), spec=spec))
    assert cuts[0].room_tokens
    _assert_repeats(spec, cuts, expected=trained)


def _trained(engine: TorchEngine) -> tuple[list[pb.PassCuts], bytes]:
    """Train; cuts of each step, and the hash of the weights."""
    cuts = []
    for step, groups in enumerate(STEPS):
        train_steps(engine, [groups], first=step)
        cuts.append(engine.cuts())
    return cuts, tensors_hash(engine.tensors())


def _assert_repeats(spec: RLJobSpec, cuts: list[pb.PassCuts], *, expected: bytes) -> None:
    """With all the memory the same, but only with the same cuts."""
    again, uncut = (engine_on(tiny_worker(spec), spec=spec) for _ in range(2))
    assert _hash_of_repeated(again, cuts) == expected
    assert _hash_of_repeated(uncut, [None] * len(STEPS)) != expected


def test_with_less_room_than_the_step_had_it_is_cut_as_it_was() -> None:
    """What is measured now is less: the rank takes what fitted before."""
    spec = trainer_spec()
    with CountedMemory() as unlimited:
        _step(_measured(spec, unlimited), spec)
    expected = _hash_of_repeated(engine_on(tiny_worker(spec), spec=spec), [None] * len(STEPS))
    with CountedMemory() as memory:
        engine = engine_on(_measured(spec, memory), spec=spec)
        memory.free_bytes = lambda: unlimited.peak_bytes() // 4  # type: ignore[method-assign]
        assert _hash_of_repeated(engine, [pb.PassCuts()] * len(STEPS)) == expected


def test_a_checkpoint_holds_the_limit_of_a_rank_alone(tmp_path: Path) -> None:
    """As if the process had not been killed; other settings forget the limit."""
    spec = trainer_spec()
    killed, resumed = (engine_on(narrow_worker(spec, rows=3), spec=spec) for _ in range(2))
    train_steps(killed, STEPS[:1])
    killed.save(tmp_path).result()
    train_steps(killed, STEPS[1:2], first=1)
    resumed.load(tmp_path)
    train_steps(resumed, STEPS[1:2], first=1)
    assert resumed.cuts() == killed.cuts()
    assert resumed.cuts().room_tokens
    assert tensors_hash(resumed.tensors()) == tensors_hash(killed.tensors())
    other = tiny_worker(trainer_spec(activationCheckpointing=True))
    other.load(str(tmp_path))
    assert other.begin(None) is None


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
        return narrow_worker(spec, rows=2, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))

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
    worker = narrow_worker(spec, rows=0, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))
    with pytest.raises(UserError, match=r"^spec.task.sampling.maxTokens: .* did not fit alone"):
        worker.accumulate(_samples(1)[:1])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_sharded")
def test_a_pass_without_a_sample_that_does_not_fit_is_not_one_of_0_tokens(tmp_path: Path) -> None:
    spec = trainer_spec()
    worker = narrow_worker(spec, rows=0, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))
    with pytest.raises(UserError, match=r"^spec.trainer: needs more memory than rank 0 has: .* pass without a sample"):
        worker.accumulate([])


@pytest.mark.usefixtures("_sharded")
def test_a_limit_that_cannot_be_kept_is_a_line(tmp_path: Path) -> None:
    """As on a full disk: the folder cannot be made."""
    (tmp_path / "memory").symlink_to("/dev/full")
    spec = trainer_spec()
    worker = narrow_worker(spec, rows=2, memory=PassMemory(spec=spec, device=None, run_dir=tmp_path))
    with pytest.raises(UserError, match=r"/memory/0.json: cannot be written"):
        worker.accumulate(_samples(1))


def test_a_rehearsal_counts_what_samples_of_differing_lengths_take() -> None:
    """Their attention works on copies, so a token takes more than one of a long sample."""
    spec = trainer_spec()
    with CountedMemory(limit_bytes=10**8) as memory:
        worker = _measured(spec, memory)
        room = worker.rehearse(60)
        free = memory.free_bytes()
    assert room is not None
    samples = [rehearsal_sample(length) for length in [14] * 20 + [6] * 20]
    with CountedMemory() as counted:
        worker = tiny_worker(spec)
        worker.accumulate(samples)
        counted.reset_peak()
        before = counted.used_bytes()
        worker.accumulate(samples)
        taken = counted.peak_bytes() - before
    tokens = sum(sample.inputs for sample in samples)
    assert taken / tokens * room < free


def test_other_errors_of_a_pass_stay_what_they_are() -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match=r"^a bug$"):
        narrow_worker(trainer_spec(), rows=0, error=broken).accumulate(_samples(1))


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


def test_a_rehearsal_spreads_its_tokens_over_the_experts() -> None:
    """Ranks of an expert group would else measure what no sample takes."""
    spec, chosen = trainer_spec(), set[int]()
    model = family_model("qwen3_moe")
    attend_by_document(model)
    answer_logprobs(model)
    stacks_of(model)[0].register_forward_pre_hook(lambda _, given: chosen.update(given[1].flatten().tolist()))
    models = RankModels(model=model, tokenizer=tiny_tokenizer(), algorithm=create_algorithm(spec))
    with CountedMemory() as memory:
        RankWorker(models, spec=spec, memory=PassMemory(spec=spec, device=memory, run_dir=None)).rehearse(60)
    assert chosen == {0, 1, 2, 3}


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
