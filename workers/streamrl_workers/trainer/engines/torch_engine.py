"""The trainer engine with torch, as the step loop sees it: lives on rank 0 and tells all ranks what to compute.

Owns: how it and the worker of every rank are built, the step's metrics. Does not own: models and gradients (`worker.py`), how the
ranks are reached (`process_group.py`), the order of a step's work (`training_step.py`), the loss (`algorithms/`).

    step loop ─▶ TORCH ENGINE ─▶ training step (samples, rounds, updates) ─▶ Ranks ─▶ RankWorker on every rank

Rank 0 loads the whole model into its memory; every rank gets its part from there (docs/decisions/0006-ranks.md). Models are made in one
order: copies first, then adapters, compiled blocks, activation checkpointing, number format, shards; each of these changes the model in place.
"""

import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore  # as torch.distributed shows it, where mypy sees it
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl.spec.algorithm import UtteranceCritic
from streamrl.spec.training import Trainer
from streamrl_workers.models.documents import attend_by_document, takes_documents
from streamrl_workers.models.frozen import TEACHER, frozen_directory
from streamrl_workers.models.load import load_config, load_empty, load_model, load_tokenizer
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.models.rope import rope_switch
from streamrl_workers.models.side_path import train_side_path
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.stream.packing import pack_float32
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import Algorithm
from streamrl_workers.trainer.engines import sharding
from streamrl_workers.trainer.engines.context_parallel import check_rows, context_group
from streamrl_workers.trainer.engines.engine import FileHashes, Kept, RankEnvironment
from streamrl_workers.trainer.engines.forward import (
    Reference,
    UtteranceValueModel,
    ValueModel,
    forward_metrics,
    logprob_diff_metrics,
)
from streamrl_workers.trainer.engines.memory import check_memory
from streamrl_workers.trainer.engines.packing import Layout
from streamrl_workers.trainer.engines.pass_memory import CudaMemory, PassMemory, longest_tokens
from streamrl_workers.trainer.engines.process_group import DataRanks, ProcessGroup, Ranks, SingleRank, everywhere
from streamrl_workers.trainer.engines.rank_link import Payload
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.sharding import (
    START_S,
    compile_blocks,
    device_of,
    fsdp_mesh,
    group_timeout,
    join_group,
    mesh_of_one,
    open_store,
    rank_of,
    reach_store,
    recompute_blocks,
    shard_first,
)
from streamrl_workers.trainer.engines.step_metrics import StepMetrics, is_trained
from streamrl_workers.trainer.engines.tensor_parallel import TENSOR
from streamrl_workers.trainer.engines.throughput import throughput_metrics
from streamrl_workers.trainer.engines.training_step import create_training_step
from streamrl_workers.trainer.engines.worker import RankModels, RankWorker
from streamrl_workers.trainer.replay import create_replay
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes

_STORE_PORT = "store_port"


class TorchEngine:
    """Trains a causal language model."""

    def __init__(self, ranks: Ranks, *, spec: RLJobSpec, algorithm: Algorithm) -> None:
        self._ranks = ranks
        self._pools = [pool.name for pool in spec.generators]
        layout: Layout = everywhere(ranks, "layout")[0]
        self._data_ranks = DataRanks(ranks, copies=spec.trainer.parallelism.copies)
        self._step = create_training_step(algorithm, ranks=self._data_ranks, spec=spec, layout=layout)
        self._metrics = StepMetrics(step=0)
        self._replay = create_replay(spec)
        self._fresh: list[pb.Sample] = []
        self._spec, self._rehearsed = spec, False
        self._busy_s = 0.0
        self._cuts = pb.PassCuts()

    def begin_step(self, step: int, *, attempt: int, cuts: pb.PassCuts | None = None) -> None:
        """Begin with gradients and sums of zero."""
        self._metrics = StepMetrics(step=step)
        self._busy_s = 0.0
        self._step.begin(step, attempt=attempt)
        repeated = None if cuts is None else [cuts.room_tokens, list(cuts.halved)]
        self._step.limit(everywhere(self._ranks, "begin", repeated))
        self._fresh = []
        if self._replay is not None:
            for group in self._replay.draw(step):
                self._step.add(group)

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Count groups; their samples wait for a micro-step. The first ones are rehearsed."""
        if groups and not self._rehearsed:
            longest = longest_tokens([sample for group in groups for sample in group.samples], spec=self._spec)
            self._step.limit(everywhere(self._ranks, "rehearse", longest))
            self._rehearsed = True
        for group in groups:
            self._metrics.add(group)
            self._step.add(group)
            if self._replay is not None:
                self._fresh += (sample for sample in group.samples if is_trained(sample) and not sample.resampled)

    def advance(self, *, idle: bool) -> bool:
        """One micro-step on every rank."""
        with self._busy():
            return self._step.advance(idle=idle)

    def finish_step(self) -> dict[str, float]:
        """The rest of the work, and the updates."""
        with self._busy():
            numbers = self._step.finish(self._metrics)
        self._cuts = pb.PassCuts(room_tokens=self._step.room_tokens, halved=everywhere(self._ranks, "halved")[0])
        updates = int(numbers["updates"])
        measured = forward_metrics(
            everywhere(self._data_ranks, "measured"),
            updates=updates,
            critic_updates=int(numbers.pop("critic_updates", updates)),
        )
        diffs = logprob_diff_metrics(everywhere(self._data_ranks, "logprob_diffs"), pools=self._pools)
        replayed = {} if self._replay is None else self._replay.admit(self._metrics.step, self._fresh)
        return self._metrics.metrics() | measured | diffs | numbers | replayed

    def throughput(self) -> dict[str, float]:
        """By the clocks of every rank; in the time of the calls that train."""
        copies = self._spec.trainer.parallelism.copies
        return throughput_metrics(everywhere(self._ranks, "throughput"), busy_s=self._busy_s, copies=copies)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - begun_s

    def held_out_loss(self, samples: Sequence[pb.Sample]) -> float:
        """Forward passes on every rank."""
        return self._step.held_out_loss(samples)

    def advantages(self, group_ids: Sequence[int]) -> bytes:
        """As the algorithm formed them."""
        return pack_float32(value for group_id in group_ids for value in self._step.advantages[group_id])

    def cuts(self) -> pb.PassCuts:
        """As the ranks cut them; where each computes halves on its own, there is one rank."""
        return self._cuts

    def states(self) -> list[pb.TurnState]:
        """Of earlier samples, by the replay buffer."""
        return [] if self._replay is None else self._replay.states(self._metrics.step)

    def slices(self, *, attempt: int, step: int, kept: Sequence[Kept] = ()) -> Sequence[SliceBytes]:
        """Copy on every rank; each of the others keeps what it holds."""
        version = [attempt, step, [list(one) for one in kept]]
        slices: list[SliceBytes] = everywhere(self._ranks, "slices", version)[0]
        return slices

    def tensors(self) -> dict[str, TensorBytes]:
        """Gather all tensors; where names share one storage, the first; with adapters, the base and these. No version is published by it."""
        tensors: dict[str, TensorBytes] = everywhere(self._ranks, "tensors")[0]
        return tensors

    def probe(self) -> dict[str, TensorBytes]:
        """Log-probs of fixed tokens under the weights of now, by a forward pass on every rank."""
        if not self._pools:
            return {}
        probe: dict[str, TensorBytes] = everywhere(self._ranks, "probe")[0]
        return probe

    def save(self, directory: Path) -> "Future[FileHashes]":
        """Models, optimisers, random state, beside the training; the replay buffer, at once."""
        if self._replay is not None:
            self._replay.save(directory)
        by_rank = self._ranks.begin("save", [str(directory)] * self._ranks.size)
        return begin_in_thread(lambda: dict(ChainMap(*by_rank.result())), name="trainer-saved")

    def load(self, directory: Path) -> None:
        """Go back to what was saved."""
        everywhere(self._ranks, "load", str(directory))
        if self._replay is not None:
            self._replay.load(directory)

    def export(self, directory: Path) -> None:
        """As `from_pretrained` loads it."""
        everywhere(self._ranks, "export", str(directory))


def create(setup: EngineSetup) -> TorchEngine:
    """The engine with the initial weights; with several ranks, once all of them have theirs."""
    _prepare_torch(setup)
    if setup.ranks is None:
        device = device_of(RankEnvironment())
        ranks: Ranks = SingleRank(_worker_of(setup, device=device))
    else:
        ranks = _several_ranks(setup, setup.ranks)
    return TorchEngine(ranks, spec=setup.spec, algorithm=create_algorithm(setup.spec, plugin_dir=setup.plugin_dir))


def create_follower(setup: EngineSetup) -> Callable[[Payload], RankWorker]:
    """What makes the worker of a rank above 0, from rank 0's facts."""
    _prepare_torch(setup)
    device = device_of(setup.env)
    return lambda facts: _member(setup, store=reach_store(setup.env, port=facts[_STORE_PORT]), device=device)


def _several_ranks(setup: EngineSetup, ranks: ProcessGroup) -> Ranks:
    device = device_of(setup.env)
    store, port = open_store(setup.env)
    ranks.build(partial(_member, setup, store=store, device=device), facts={_STORE_PORT: port}, timeout_s=START_S)
    return ranks


def _member(setup: EngineSetup, *, store: TCPStore, device: torch.device) -> RankWorker:
    """The worker of one of several ranks; all make theirs at the same time."""
    trainer = setup.spec.trainer
    timeout_s, offload = trainer.rank_timeout_seconds, trainer.cpu_offload
    mesh = join_group(
        setup.env,
        store=store,
        timeout_s=timeout_s,
        device=device,
        offload=offload,
        parallelism=trainer.parallelism,
    )
    return _worker_of(setup, device=device, mesh=mesh)


def _worker_of(setup: EngineSetup, *, device: torch.device, mesh: DeviceMesh | None = None) -> RankWorker:
    if setup.model_path is None:
        raise UserError(field=ENV_MODEL_PATH, rule="is required by trainer engine torch")
    models = build_models(
        setup.spec,
        model_path=setup.model_path,
        base_dir=setup.base_dir,
        plugin_dir=setup.plugin_dir,
        device=device,
        mesh=mesh,
    )
    measured = CudaMemory(device) if device.type == "cuda" else None
    return RankWorker(
        models, spec=setup.spec, memory=PassMemory(spec=setup.spec, device=measured, run_dir=setup.run_dir)
    )


def _prepare_torch(setup: EngineSetup) -> None:
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)


def build_models(
    spec: RLJobSpec,
    *,
    model_path: str,
    base_dir: Path = Path(),
    plugin_dir: Path | None = None,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> RankModels:
    """The models of this rank with the initial weights; `mesh`: of all ranks, None = this one alone. Ranks build alike, from the job's seed."""
    trainer = spec.trainer
    sharding.set_precision(trainer, device=device)
    if trainer.compile:
        sharding.check_compiler(device)
    algorithm = create_algorithm(spec, plugin_dir=plugin_dir)
    frozen_path = _frozen_path(spec, algorithm=algorithm, model_path=model_path, base_dir=base_dir)
    check_memory(model_path, spec=spec, algorithm=algorithm, frozen_path=frozen_path, device=device)
    _check_switch(model_path, algorithm=algorithm, frozen_path=frozen_path)
    if mesh is None and trainer.sharded:
        mesh = mesh_of_one(device)
    experts = _expert_mesh(trainer, mesh=mesh)
    torch.manual_seed(spec.seed)
    load_whole = load_model if rank_of() == 0 else load_empty  # the others get theirs as they are sharded
    packed = _is_packed(trainer, paths=[path for path in (model_path, frozen_path) if path is not None], device=device)

    def load(path: str) -> PreTrainedModel:
        loaded = load_whole(path)
        if packed:
            attend_by_document(loaded)
        return loaded

    model = _tuned(load(model_path), trainer=trainer)
    answer_logprobs(model)
    reference: Reference | None = None
    critic: ValueModel | None = None
    if algorithm.critic is not None:
        if isinstance(algorithm.critic, UtteranceCritic):
            critic = UtteranceValueModel.of(load(model_path))
        else:
            critic = ValueModel.of(_tuned(load(model_path), trainer=trainer))
        _finish(critic, trainer=trainer, device=device, mesh=mesh, experts=experts)
    if frozen_path is not None:
        reference = frozen(copy := load(frozen_path))
        answer_logprobs(copy)
        _finish(copy, trainer=trainer, device=device, mesh=mesh, experts=experts, trained=False)
    if trainer.lora is not None:
        from streamrl_workers.models.lora import add_adapters  # peft is loaded where it is asked for
        from streamrl_workers.trainer.engines.lora import adapters_off

        add_adapters(model, trainer.lora)
        if frozen_path is None and algorithm.reference_kl is not None and trainer.reference is None:
            reference = partial(adapters_off, model)
    _finish(model, trainer=trainer, device=device, mesh=mesh, experts=experts)
    tokenizer = load_tokenizer(model_path)
    context = None
    if mesh is not None:
        timeout = group_timeout(trainer.rank_timeout_seconds, device=device)
        context = context_group(mesh, ranks=trainer.parallelism.context, timeout=timeout)
    return RankModels(
        model=model,
        tokenizer=tokenizer,
        algorithm=algorithm,
        reference=reference,
        critic=critic,
        context=context,
    )


def _expert_mesh(trainer: Trainer, *, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh with expert groups; None: each rank computes all experts."""
    experts = trainer.parallelism.expert
    if mesh is None or experts == 1:
        return None
    return sharding.expert_mesh(mesh, experts=experts, timeout_s=trainer.rank_timeout_seconds)


def _check_switch(model_path: str, *, algorithm: Algorithm, frozen_path: str | None) -> None:
    """Refuse what does not go with rotary factors that change with the length (`models/rope.py`)."""
    switch = rope_switch(load_config(model_path))
    if switch is not None and isinstance(algorithm.critic, UtteranceCritic):
        raise UserError(
            field=ENV_MODEL_PATH,
            rule="must have one set of rotary factors (no longrope) for a critic of utterances",
            fix="take another model, or another algorithm",
        )
    if frozen_path is not None and rope_switch(load_config(frozen_path)) != switch:
        raise UserError(field=TEACHER, rule="must switch its rotary factors (longrope) where the trained model does")


def _is_packed(trainer: Trainer, *, paths: Sequence[str], device: torch.device) -> bool:
    """Whether the samples of a pass lie in one row. Raises UserError if the job demands it of models that cannot be given such rows."""
    if trainer.parallelism.context > 1:
        for path in paths:
            check_rows(load_empty(path), parallelism=trainer.parallelism)
        return True
    wanted = trainer.micro_batch_layout
    if wanted == "Padded" or (wanted == "Auto" and device.type != "cpu"):
        return False
    for path in paths:
        able = takes_documents(load_empty(path))
        if not able and wanted == "Packed":
            raise UserError(
                field="spec.trainer.microBatchLayout",
                rule=f"must be Auto or Padded for {path}: it carries state from token to token, or has an attention of its own",
                got=wanted,
                fix="leave it out",
            )
        if not able:
            return False
    return True


def _tuned(model: PreTrainedModel, *, trainer: Trainer) -> PreTrainedModel:
    """With its side path, in place, if the job has one: policy and critic alike."""
    if trainer.sherl is not None:
        train_side_path(model, trainer.sherl)
    return model


def _frozen_path(spec: RLJobSpec, *, algorithm: Algorithm, model_path: str, base_dir: Path) -> str | None:
    """The model that is frozen beside the policy: the teacher, or the initial one; None: none, another pool's, or the policy without its adapters."""
    if spec.trainer.reference is not None:
        return None
    if spec.algorithm.teacher is not None:
        return frozen_directory(spec.algorithm.teacher, base_dir=base_dir, field=TEACHER)
    return model_path if algorithm.reference_kl is not None and spec.trainer.lora is None else None


def frozen(model: PreTrainedModel) -> Reference:
    """The reference that is a second model in memory."""
    model.eval().requires_grad_(requires_grad=False)  # type: ignore[no-untyped-call] # transformers'
    return lambda: nullcontext(model)


def _finish(
    model: torch.nn.Module,
    *,
    trainer: Trainer,
    device: torch.device,
    mesh: DeviceMesh | None,
    experts: DeviceMesh | None,
    trained: bool = True,
) -> None:
    """In place: what makes a loaded model one that this rank computes with."""
    dtype = sharding.published_dtype(trainer.number_format)
    compute = None if dtype is torch.float32 else dtype
    if trainer.compile:
        compile_blocks(model)
    if trainer.activation_checkpointing and trained:
        recompute_blocks(model)
    if mesh is not None:
        reduce = sharding.published_dtype(trainer.reduce_dtype) if trainer.ranks > 1 else torch.float32
        shard_first(  # moves it to the device, block by block
            model,
            mesh=fsdp_mesh(mesh),
            tensor=mesh[TENSOR],
            experts=experts,
            compute=compute,
            reduce=reduce,
            offload=trainer.cpu_offload,
        )
        return
    model.to(device)
