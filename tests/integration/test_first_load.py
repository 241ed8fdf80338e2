"""The first load of every generator is proved: its engine gives the trainer's log-probs, or the process ends with one line."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.models.probe import PROBE, Prover, probe_tokens, take_probe
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash
from support.engine_requests import request, sampling
from support.model_families import FAMILIES, LONGROPE, save_tiny
from support.trainer_groups import make_group, trainer_spec

SUPPORTED = tuple(FAMILIES)
STARTS = 200
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _trainer(folder: Path, **trainer: object) -> TorchEngine:
    spec = trainer_spec(**trainer)
    models = build_models(spec, model_path=str(folder), device=torch.device("cpu"))
    return TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))


def _published(trainer: TorchEngine) -> dict[str, TensorBytes]:
    return trainer.tensors() | trainer.probe()


def _engine(folder: Path, *, kind: type[HfEngine] = HfEngine, precision: str = "FP32", **spec: object) -> HfEngine:
    options = EngineOptions(
        spec=HfSpec.model_validate({"slots": 4, **spec}), model_path=str(folder), threads=1, precision=precision
    )
    engine = create_hf(options)
    engine.__class__ = kind
    return engine


class _SwappedLayers(HfEngine):
    """Puts the weights of one layer into another: right names, right shapes."""

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        other = {name: name.replace("layers.0.", "layers.1.") for name in tensors if "layers.0." in name}
        swapped = {**tensors, **{name: tensors[into] for name, into in other.items()}}
        swapped |= {into: tensors[name] for name, into in other.items()}
        return super().load_weights(version=version, tensors=swapped)


class _ChangedFactor(HfEngine):
    """Computes with other rotary frequencies, which no published tensor holds."""

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        for name, buffer in self._runner.model.named_buffers():
            if name.endswith("inv_freq"):
                buffer.mul_(0.5)
        return super().load_weights(version=version, tensors=tensors)


class _NanBeside(HfEngine):
    """Gives NaN beside another sequence, as padding that is not masked may."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found = super().score(sequences)
        return found if len(found) == 1 else [[float("nan")] * len(row) for row in found]


class _BatchMates(HfEngine):
    """Computes a sequence otherwise beside a longer one, as a model does whose factors follow the longest of the batch."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found = super().score(sequences)
        is_mixed = len({len(tokens) for tokens in sequences}) > 1
        return [[one - 0.5 for one in row] for row in found] if is_mixed else found


async def _served(engine: HfEngine, tensors: dict[str, TensorBytes]) -> pb.Progress:
    """The sample that an engine loop sends, which has a request before it has weights."""

    async def pull(_: Route) -> dict[str, TensorBytes]:
        return tensors

    outbox = GeneratorOutbox()
    outbox.open()
    loop = EngineLoop(engine, pull=pull, outbox=outbox, recorder=Recorder(sink=None, metrics=None))
    loop.connected()
    loop.issue([request(1, "1+1=", limits=sampling(max_tokens=4))])
    loop.announce(pb.WeightsAvailable(version=pb.VersionName(attempt=1, step=0, hash=b"h"), address="a:1"))
    task = asyncio.create_task(loop.run(), name="loop")
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                filled = asyncio.create_task(outbox.filled.wait(), name="filled")
                await asyncio.wait({filled, task}, return_when=asyncio.FIRST_COMPLETED)
                filled.cancel()
                if task.done():
                    task.result()
                for event in outbox.pop(running=False):
                    if event.HasField("progress"):
                        return event.progress.items[0]
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_right_engine_generates(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    item = await _served(_engine(tmp_path), _published(_trainer(tmp_path)))
    assert item.finish_reason == "length"


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3", _SwappedLayers), ("llama", _ChangedFactor), (LONGROPE, _BatchMates), ("qwen3", _NanBeside)],
)
async def test_a_wrong_engine_ends_with_one_line_and_no_sample(
    family: str, kind: type[HfEngine], tmp_path: Path
) -> None:
    save_tiny(family, tmp_path)
    tensors = _published(_trainer(tmp_path))
    named = FAMILIES[family].model_type
    line = rf"spec\.generators.*hf on a model of family '{named}' differs by ([0-9.]+|nan) nats .*at most 0\.001\)"
    engine = _engine(tmp_path, kind=kind)
    with pytest.raises(UserError, match=line):
        await _served(engine, tensors)
    assert engine.active() == 0


async def test_one_slot_is_enough(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    item = await _served(_engine(tmp_path, slots=1), _published(_trainer(tmp_path)))
    assert item.finish_reason == "length"


async def test_a_generator_that_joins_late_is_proved_by_the_version_of_then(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    trainer = _trainer(tmp_path, learningRate=0.05)
    first = trainer.probe()
    trainer.begin_step(0, attempt=1)
    trainer.add([make_group(1, vocabulary=20)])
    trainer.finish_step()
    assert (await _served(_engine(tmp_path), _published(trainer))).finish_reason == "length"
    with pytest.raises(UserError, match="nats a token"):
        await _served(_engine(tmp_path), trainer.tensors() | first)


def test_a_trainer_whose_samples_depend_on_their_batch_mates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(LONGROPE, tmp_path)
    monkeypatch.setattr("streamrl_workers.models.rope._each_document", lambda *_: None)  # what transformers does alone
    trainer = _trainer(tmp_path)
    with pytest.raises(UserError, match=r"family 'phi3' in trainer engine torch differs by [0-9.]+ nats"):
        trainer.probe()


@pytest.mark.parametrize("family", SUPPORTED)
def test_right_families_raise_no_alarm(family: str, tmp_path: Path) -> None:
    _start(family, tmp_path, seed=0, precision="FP32")


@pytest.mark.soak
def test_two_hundred_right_starts_raise_no_alarm(tmp_path: Path) -> None:
    for number in range(STARTS):
        family = SUPPORTED[number % len(SUPPORTED)]
        _start(family, tmp_path / str(number), seed=number, precision="BF16" if number % 4 == 3 else "FP32")


def _start(family: str, folder: Path, *, seed: int, precision: str) -> None:
    """What a trainer and a generator do at the start of a run. In bfloat16 logits are as far apart as in models that people train."""
    save_tiny(family, folder, seed=seed, **({} if precision == "FP32" else {"initializer_range": 0.08}))
    tensors, probe = take_probe(_published(_trainer(folder, precision=precision)))
    assert probe is not None and probe.short.logprobs
    engine = _engine(folder, precision=precision)
    engine.load_weights(version=0, tensors=tensors)
    Prover(precision=precision).prove(engine, probe)


def test_the_probe_is_part_of_what_a_version_is_named_by(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    trainer = _trainer(tmp_path)
    tensors = _published(trainer)
    assert tensors[PROBE] == _published(trainer)[PROBE]
    assert tensors_hash(tensors) != tensors_hash(trainer.tensors())
    with pytest.raises(ValueError, match="cannot be read"):
        take_probe({PROBE: TensorBytes("uint8", (3,), memoryview(b"\xff\xff\xff"))})


@pytest.mark.parametrize(
    ("limit", "most", "switches", "reach", "lengths"),
    [
        (4096, 2048, [], 1000, (64, 128)),
        (100, 2048, [], 1000, (49, 99)),
        (4096, 2048, [512], 1000, (64, 545)),  # crossed, by as many tokens as an engine compares
        (4096, 2048, [512], 512, (64, 128)),  # no sample is so long
        (4096, 2048, [100], 50, (50, 100)),  # nor may the probe be
        (4096, 2048, [16, 512], 1000, (15, 545)),
        (4096, 500, [512], 1000, (64, 128)),  # more than a forward pass takes
        (400, 2048, [380], 1000, (64, 128)),  # no room for the tokens after it
        (2, 2048, [], 1000, (0, 0)),
    ],
)
def test_lengths_of_the_probe(limit: int, most: int, switches: list[int], reach: int, lengths: tuple[int, int]) -> None:
    sequences = probe_tokens(
        list(range(5, 30)),
        begin=[1],
        limit_tokens=limit,
        most_tokens=most,
        switches=switches,
        reach_tokens=reach,
    )
    assert tuple(map(len, sequences)) == lengths
    assert all(one[0] == 1 and set(one[1:]) <= set(range(5, 30)) for one in sequences if one)


@pytest.mark.parametrize(
    ("prover", "spread", "bound"),
    [
        (Prover(), 0.0, 1e-3),
        (Prover(), 1e-3, 5e-3),
        (Prover(), 1.0, 1e-2),
        (Prover(precision="BF16"), 0.0, 0.05),
        (Prover(precision="BF16"), 1.0, 0.5),
        (Prover(precision="BF16", quantized=True), 0.0, 0.5),
    ],
)
def test_bounds(prover: Prover, spread: float, bound: float) -> None:
    assert prover.bound(spread) == pytest.approx(bound)
