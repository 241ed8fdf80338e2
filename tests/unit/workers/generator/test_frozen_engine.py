"""The engine of a frozen pool says what the trainer itself would say: of prompts, turns, contexts, in any passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec
from streamrl_workers.generator.engines import create_frozen_hf
from streamrl_workers.generator.engines.base import Delta, Engine, EngineOptions
from streamrl_workers.stream.packing import pack_float32
from streamrl_workers.stream.segments import trained_places, trained_tokens
from streamrl_workers.trainer.engines.packing import PackedSample, pack_sample
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from support.model_families import LONGROPE, save_tiny
from support.tiny_folder import tiny_folder
from support.tiny_trainer import REFERENCE_SEED, engine_on, tiny_worker
from support.trainer_groups import branched, make_group, multi_turn, trainer_spec

TEMPERATURE = 0.8
SAMPLES = [
    sample
    for group in (make_group(1), multi_turn(2, [0.0, 1.0, 0.5]), branched(3, [0.1, 0.3, 0.2, 0.0]), make_group(4))
    for sample in group.samples
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model", seed=REFERENCE_SEED)


def engine_of(folder: Path, *, slots: int = 64, pass_tokens: int = 4096, batch_invariant: bool = False) -> Engine:
    spec = HfEngineSpec.model_validate({"slots": slots, "batchInvariant": batch_invariant})
    options = EngineOptions(spec=spec, model_path=str(folder), threads=1)
    return create_frozen_hf(options, pass_tokens=pass_tokens)


def request_of(lease: int, sample: pb.Sample) -> pb.SampleRequest:
    finished = pb.Sample(prompt_tokens=sample.prompt_tokens, tokens=sample.tokens, segments=sample.segments)
    return pb.SampleRequest(lease=lease, sampling=pb.Sampling(temperature=TEMPERATURE), finished=finished)


def answers(engine: Engine, samples: list[pb.Sample]) -> dict[int, Delta]:
    waiting = [request_of(lease, sample) for lease, sample in enumerate(samples)]
    found: dict[int, Delta] = {}
    while waiting or engine.active():
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        found |= {delta.lease: delta for delta in [*engine.add(admitted), *engine.step()]}
    return found


KL = {"referenceKl": {"coefficient": 0.3}}


def measured(samples: list[pb.Sample], found: dict[int, Delta]) -> list[pb.Sample]:
    """As the scheduler stores them."""
    copies = [pb.Sample.FromString(sample.SerializeToString()) for sample in samples]
    for lease, copy in enumerate(copies):
        copy.reference_logprobs = pack_float32(found[lease].logprobs)
    return copies


def packed(samples: list[pb.Sample]) -> list[PackedSample]:
    return [part for one in samples for part in pack_sample(one, step=0, attempt=1, advantage=0.5)]


@pytest.mark.parametrize(("slots", "pass_tokens"), [(64, 4096), (64, 16), (3, 64)])
def test_log_probs_are_those_of_the_trainer(folder: Path, slots: int, pass_tokens: int) -> None:
    found = answers(engine_of(folder, slots=slots, pass_tokens=pass_tokens), SAMPLES)
    spec = trainer_spec(algorithm=KL, temperature=TEMPERATURE)
    worker = RankWorker(build_models(spec, model_path=str(folder), device=torch.device("cpu")), spec=spec)
    for ours, theirs in zip(packed(measured(SAMPLES, found)), worker.prepare(packed(SAMPLES)), strict=True):
        assert ours.reference_N is not None
        assert list(ours.reference_N) == pytest.approx(list(theirs["reference_N"]), abs=1e-5)
    for lease, sample in enumerate(SAMPLES):
        assert (found[lease].finish_reason, found[lease].tokens) == ("stop", ())
        assert sum(number != 0.0 for number in found[lease].logprobs) == trained_tokens(sample)


def test_rotary_factors_switch_by_each_samples_own_length(tmp_path: Path) -> None:
    save_tiny(LONGROPE, tmp_path)
    samples = [*make_group(1, vocabulary=20).samples]
    long = pb.Sample.FromString(samples[0].SerializeToString())
    for _ in range(5):  # 40 tokens and more, beyond the switch at 32
        long.MergeFrom(pb.Sample(spans=samples[1].spans))
        long.tokens += samples[1].tokens
        long.logprobs += samples[1].logprobs
    assert trained_tokens(long) > 32
    found = answers(engine_of(tmp_path), [*samples, long])
    spec = trainer_spec(algorithm=KL, temperature=TEMPERATURE)
    worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=torch.device("cpu")), spec=spec)
    for lease, sample in enumerate([*samples, long]):
        ((alone,), (theirs,)) = packed(measured([sample], {0: found[lease]})), worker.prepare(packed([sample]))
        assert alone.reference_N is not None
        assert list(alone.reference_N) == pytest.approx(list(theirs["reference_N"]), abs=1e-5)


def test_a_batch_invariant_pool_says_of_each_sample_what_it_says_of_it_alone(folder: Path) -> None:
    together = answers(engine_of(folder, batch_invariant=True), SAMPLES)
    for lease, sample in enumerate(SAMPLES):
        (alone,) = answers(engine_of(folder, batch_invariant=True), [sample]).values()
        assert alone.logprobs == together[lease].logprobs


@pytest.mark.parametrize("correction", [None, {"m2po": {"threshold": 2.0}}])
def test_a_trainer_without_the_model_trains_alike_on_measured_samples(correction: dict[str, Any] | None) -> None:
    groups = [make_group(1), multi_turn(2, [0.0, 1.0, 0.5]), branched(3, [0.1, 0.3, 0.2, 0.0])]
    job: dict[str, Any] = {"algorithm": KL, "temperature": TEMPERATURE, "correction": correction}
    within, apart = trainer_spec(**job), trainer_spec(**job, reference={"pool": "frozen"})
    whole, bare = tiny_worker(within), tiny_worker(apart)
    said = whole.prepare(packed([sample for group in groups for sample in group.samples]))
    with_model, without = engine_on(whole, spec=within), engine_on(bare, spec=apart)
    with_model.begin_step(0, attempt=1)
    with_model.add(groups)
    metrics = with_model.finish_step()
    without.begin_step(0, attempt=1)
    without.add(told(groups, said))
    assert without.finish_step() == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert metrics["reference_kl"] > 0


def told(groups: list[pb.Group], said: list[dict[str, Any]]) -> list[pb.Group]:
    """The groups, each drawn token with what the trainer said of it."""
    rows, copies = iter(said), [pb.Group.FromString(group.SerializeToString()) for group in groups]
    for sample in (sample for group in copies for sample in group.samples):
        numbers = iter([number for _ in pack_sample(sample, step=0, attempt=1) for number in next(rows)["reference_N"]])
        drawn = set(trained_places(sample))
        sample.reference_logprobs = pack_float32(
            next(numbers) if place in drawn else 0.0 for place in range(len(sample.tokens) >> 2)
        )
    return copies


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (pb.Sample(prompt_tokens=bytes(4 * 60), tokens=bytes(4 * 9)), "68 tokens, the frozen model has 64 positions"),
        (pb.Sample(prompt_tokens=bytes(4), tokens=b"\xff\0\0\0"), "token 255, the frozen model knows 33"),
    ],
)
def test_what_cannot_be_computed_is_refused_alone(folder: Path, sample: pb.Sample, error: str) -> None:
    found = answers(engine_of(folder), [sample, SAMPLES[0]])
    assert (found[0].finish_reason, found[0].error) == ("error", error)
    assert found[1].finish_reason == "stop"


def test_a_request_to_generate_is_refused(folder: Path) -> None:
    (refused,) = engine_of(folder).add([pb.SampleRequest(lease=3, prompt="w1")])
    assert (refused.lease, refused.error) == (3, "a frozen model generates nothing")


def test_a_cancelled_sample_is_forgotten(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add([request_of(1, SAMPLES[0]), request_of(2, SAMPLES[1])])
    engine.cancel([1, 7])
    assert [delta.lease for delta in engine.step()] == [2]
    assert engine.free() == engine.slots
