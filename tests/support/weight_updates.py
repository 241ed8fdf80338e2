"""A trainer that publishes adapters or deltas, and a generator that follows it: each token against the trainer's own forward."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl.spec.rljob import Metadata
from streamrl_workers.generator.engines.base import Delta, Engine
from streamrl_workers.generator.settings import GeneratorSettings
from streamrl_workers.generator.weights import pull_of
from streamrl_workers.process.environment_variables import WorkerVariables
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.forward import Forward, make_batch
from streamrl_workers.trainer.engines.packing import pack_sample
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import Nearby
from streamrl_workers.weights.store import WeightStore
from support.trainer_groups import make_group
from support.vllm_models import CHARS, make, save

TOKEN = "secret"
CPU = torch.device("cpu")
UPDATES = 5
RESUMED = 3
"""The version that the second attempt begins from."""
TOKENS = 120
"""At least so many are generated under each version."""
CLOSE, APART = 1e-4, 2e-3
"""Log-probs of the same weights, and of those one step older."""
MOST_DELTA = 0.8
"""Share of a version that comes as deltas where steps are large: a tensor that gains little by them is sent whole."""


class PublishingTrainer:
    """One attempt of a trainer: a real engine, its store, its server of weights."""

    def __init__(self, spec: RLJobSpec, *, folder: Path, checkpoints: Path, attempt: int = 1) -> None:
        models = build_models(spec, model_path=str(folder), device=CPU)
        self.engine = TorchEngine(
            SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec)
        )
        self.store = WeightStore(deltas=DeltaStore() if spec.weights.has_deltas else None)
        self.address = ""
        self._forward = Forward(models.model, temperature=1.0)
        self._checkpoints = checkpoints
        self._attempt = attempt

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = HttpWeightServer(self.store, token=TOKEN)
        self.address = server.address
        try:
            yield
        finally:
            server.close()

    def train(self, step: int) -> None:
        """Version `step` becomes the next."""
        self.engine.begin_step(step, attempt=self._attempt)
        self.engine.add([make_group(number, step=step, vocabulary=len(CHARS)) for number in range(3)])
        assert self.engine.finish_step()["gradient_norm"] > 0

    def publish(self, version: int) -> pb.WeightsAvailable:
        """With a checkpoint of it."""
        folder = self._checkpoints / str(version)
        folder.mkdir(exist_ok=True)
        self.engine.save(folder).result()
        name = self.store.publish(attempt=self._attempt, step=version, tensors=self.tensors())
        return pb.WeightsAvailable(version=name, address=self.address)

    def tensors(self) -> dict[str, TensorBytes]:
        """Of now, as they are published."""
        return self.engine.tensors()

    def go_back(self, version: int) -> None:
        """To the checkpoint of an earlier one."""
        self.engine.load(self._checkpoints / str(version))

    @torch.no_grad()
    def logprobs(self, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
        """Of the tokens under the trainer's weights of now, by its own forward, adapters unmerged."""
        sample = pb.Sample(
            prompt_tokens=pack_int32(prompt),
            tokens=pack_int32(tokens),
            logprobs=pack_float32([0.0] * len(tokens)),
            spans=[pb.VersionSpan(tokens=len(tokens), step=0, attempt=1)],
        )
        packed = pack_sample(sample, step=0, attempt=1, advantage=0.0)
        return self._forward.logprobs(make_batch(packed, aggregation="TokenMean", device=CPU)).tolist()


class Follower:
    """A generator's engine and pull."""

    def __init__(self, engine: Engine, spec: RLJobSpec, *, folder: Path) -> None:
        self.engine = engine
        self.fetched: list[int] = []
        """Bytes that came over the network, a version each."""
        self._gained: dict[int, list[Delta]] = defaultdict(list)
        self._issued = 0
        self.pull = pull_of(
            GeneratorSettings(
                run_dir=folder,
                process="g",
                pool=spec.generators[0],
                spec=spec,
                metadata=Metadata(name="updates"),
                scheduler_address="",
                signals_port=0,
                model_path=str(folder),
                threads=1,
                variables=WorkerVariables(token=TOKEN),
            ),
            arrived=self._arrived,
            nearby=Nearby(delta_failed=self._delta_failed),
        )

    def _arrived(self, size_bytes: int, *, source: str) -> None:
        self.fetched[-1] += size_bytes

    def _delta_failed(self) -> None:
        raise AssertionError("a delta could not be used")

    async def follow(self, target: pb.WeightsAvailable, *, tokens: int = TOKENS) -> dict[str, TensorBytes]:
        """Pull and load a version, and generate under it. Returns what the engine was given.

        An engine that works by itself has ended its samples while the trainer trained: new ones begin, for the update to fall into.
        """
        self.fetched.append(0)
        tensors = await self.pull(Route(target))
        if self._gained:
            self._generate(4 * self.engine.slots)  # some of each
        self._take(self.engine.load_weights(version=target.version.step, tensors=tensors))
        self._generate(tokens)
        return tensors

    def _generate(self, tokens: int) -> None:
        """With all slots taken, until so many more are made."""
        made = 0
        while made < tokens:
            free = self.engine.free()
            self._take(self.engine.add([_sample(self._issued + place) for place in range(free)]))
            self._issued += free
            made += self._take(self.engine.step())

    def restart(self) -> None:
        """What runs is cancelled, what was made is forgotten."""
        self.engine.cancel(self._gained)
        self._gained.clear()

    def check(self, trainer: PublishingTrainer, *, versions: Sequence[int]) -> None:
        """Each token's log-prob is that of the trainer's own forward under the version that it names, and of no other."""
        for version in versions:
            trainer.go_back(version)
            assert max(self._differences(trainer, version=version)) < CLOSE
            if version > versions[0]:
                trainer.go_back(version - 1)
                assert max(self._differences(trainer, version=version)) > APART

    def crossed(self) -> int:
        """Samples that updates fell into."""
        return sum(len({delta.version for delta in deltas if delta.tokens}) > 1 for deltas in self._gained.values())

    def changes(self, trainer: PublishingTrainer, *, version: int, since: int) -> tuple[list[float], list[float]]:
        """From the trainer's log-probs under version `since` to its own and to the generator's under `version`, of the tokens made under this."""
        trainer.go_back(version)
        pairs = self._pairs(trainer, version=version)
        trainer.go_back(since)
        before = [truth for _, truth in self._pairs(trainer, version=version)]
        own = [truth - old for (_, truth), old in zip(pairs, before, strict=True)]
        return own, [given - old for (given, _), old in zip(pairs, before, strict=True)]

    def _differences(self, trainer: PublishingTrainer, *, version: int) -> list[float]:
        return [abs(given - truth) for given, truth in self._pairs(trainer, version=version)]

    def _pairs(self, trainer: PublishingTrainer, *, version: int) -> list[tuple[float, float]]:
        """The generator's log-prob and the trainer's of now, of each token made under `version`."""
        found = []
        for deltas in self._gained.values():
            tokens = [token for delta in deltas for token in delta.tokens]
            versions = [delta.version for delta in deltas for _ in delta.tokens]
            given = [logprob for delta in deltas for logprob in delta.logprobs]
            assert versions == sorted(versions)
            if version in versions:
                truth = trainer.logprobs(deltas[0].prompt_tokens or (), tokens)
                found += [(a, b) for a, b, v in zip(given, truth, versions, strict=True) if v == version]
        assert len(found) >= TOKENS
        return found

    def _take(self, deltas: list[Delta]) -> int:
        for delta in deltas:
            assert delta.error is None, delta.error
            self._gained[delta.lease].append(delta)
        return sum(len(delta.tokens) for delta in deltas)


def model_folder(kind: str, folder: Path) -> Path:
    """A model of `vllm_models` with its weights."""
    make(kind, seed=1).save_pretrained(folder)
    return save(kind, folder)


async def check_updates(engine: Engine, spec: RLJobSpec, *, folder: Path, checkpoints: Path) -> None:
    """Five updates, a generator that joins behind them, and a trainer that starts again from a checkpoint."""
    trainer, follower = (
        PublishingTrainer(spec, folder=folder, checkpoints=checkpoints),
        Follower(engine, spec, folder=folder),
    )
    async with trainer.serving():
        given = await follower.follow(trainer.publish(0))
        for version in range(UPDATES):
            trainer.train(version)
            target = trainer.publish(version + 1)
            given = await follower.follow(target)
        late = Follower(engine, spec, folder=folder)
        late.fetched.append(0)
        assert await late.pull(Route(target)) == given
    sizes = {name: tensor.data.nbytes for name, tensor in trainer.engine.tensors().items()}
    whole = sum(sizes.values())
    changing = sum(size for name, size in sizes.items() if any(mark in name for mark in _marks(spec)))
    most = changing or whole * MOST_DELTA
    assert late.fetched == [whole]
    assert follower.fetched[0] == whole
    assert all(0 < fetched <= most for fetched in follower.fetched[1:]), (whole, follower.fetched)
    follower.check(trainer, versions=range(UPDATES + 1))
    assert follower.crossed()
    await _check_restart(follower, PublishingTrainer(spec, folder=folder, checkpoints=checkpoints, attempt=2))
    if changing:
        assert all(0 < fetched <= changing for fetched in follower.fetched[1:])


def _marks(spec: RLJobSpec) -> tuple[str, ...]:
    """In the names of what a trainer that keeps a base changes: adapters, or a side path and the last of two layers."""
    if spec.trainer.sherl is not None:
        return (".side_path.", ".layers.1.")
    return (":lora_",) if spec.trainer.lora is not None else ()


async def _check_restart(follower: "Follower", trainer: PublishingTrainer) -> None:
    """The base of adapters that the generator holds serves the second attempt too."""
    follower.restart()
    trainer.go_back(RESUMED)
    async with trainer.serving():
        await follower.follow(trainer.publish(RESUMED))
        trainer.train(RESUMED)
        await follower.follow(trainer.publish(RESUMED + 1))
    follower.check(trainer, versions=(RESUMED, RESUMED + 1))


def _sample(lease: int) -> pb.SampleRequest:
    return pb.SampleRequest(
        lease=lease,
        group_id=lease,
        prompt=f"{lease}+{lease // 2}=",
        seed=lease,
        sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=60),
    )
