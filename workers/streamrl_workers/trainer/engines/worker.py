"""What every rank computes, in lockstep: forward and backward passes, sums, optimiser updates.

Owns: the models of this rank, their gradients, the sums of a step. Does not own: which sample goes where (`training_step.py`), how
gradients become updates (`optimiser.py`), processes (`process_group.py`), files (`model_files.py`).

Each public method of `RankWorker` takes one payload and answers with one (`rank_link.Payload`), and is called on every rank in the
same order. A rank without samples passes a dummy through the same models: what runs, runs everywhere.

Gradients are accumulated as sums of weighted token losses and scaled once at the update, so the cut into micro-batches does not
matter. They are zeroed, never dropped: a step in which nothing was learned still moves by its momentum, as one big batch of zero
gradients would. Above one rank each holds a part of every tensor; the norm is that of all parts, so all ranks clip and skip alike.

A micro-step for which the memory does not suffice is computed in halves. Where its backward pass had begun to add, the update's
micro-steps are computed again from its start: half a gradient is never kept. That is so where nothing is sharded; what follows among
shards is decided in `pass_memory.py`.
"""

import gc
import random
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl.spec.algorithm import UtteranceCritic
from streamrl_workers.models.checkpoint_layout import CheckpointLayout
from streamrl_workers.models.documents import attends_by_document, attention_tokens
from streamrl_workers.models.free_memory import free_bytes
from streamrl_workers.models.probe import (
    LONG_TOKENS,
    PROBE_TEXT,
    TEXT_VOCABULARY,
    Prover,
    as_tensor_bytes,
    probe_tokens,
)
from streamrl_workers.models.rope import rope_switch
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.algorithms.algorithm import Algorithm, TokenBatch, TokenLoss
from streamrl_workers.trainer.engines import model_files
from streamrl_workers.trainer.engines.collectives import measure_collectives
from streamrl_workers.trainer.engines.engine import FileHashes
from streamrl_workers.trainer.engines.forward import (
    Forward,
    ForwardMetrics,
    LogprobDiff,
    MicroBatch,
    Reference,
    UtteranceValueModel,
    ValueModel,
    critic_values,
    make_batch,
    value_loss,
)
from streamrl_workers.trainer.engines.optimiser import Optimiser
from streamrl_workers.trainer.engines.packing import (
    DUMMY,
    Layout,
    PackedSample,
    Update,
    rehearsal_sample,
    scored_sample,
)
from streamrl_workers.trainer.engines.pass_memory import MAY_BE_MEMORY, PassMemory
from streamrl_workers.trainer.engines.rank_link import Payload
from streamrl_workers.trainer.engines.shard_files import ShardWriter, shard_path
from streamrl_workers.trainer.engines.sharding import compute_device, rank_of
from streamrl_workers.trainer.engines.slices import copy_slices
from streamrl_workers.trainer.engines.throughput import Throughput
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes

_CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModels:
    """What a rank works on; the worker's own from now on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm
    reference: Reference | None = None  # where the algorithm has a `reference_kl`
    critic: ValueModel | None = None  # where the algorithm has a `critic`
    context: dist.ProcessGroup | None = None  # ranks that share each row


class RankWorker:
    """One rank of the trainer."""

    def __init__(self, models: RankModels, *, spec: RLJobSpec, memory: PassMemory | None = None) -> None:
        self._memory = PassMemory(spec=spec, device=None, run_dir=None) if memory is None else memory
        self._model = models.model.eval()  # type: ignore[no-untyped-call] # no dropout: ratios compare log-probs of the same function
        self._tokenizer = models.tokenizer
        self._algorithm = models.algorithm
        self._reference = models.reference
        self._critic = models.critic
        self._context = models.context
        self._pools = [pool.name for pool in spec.generators]
        self._precision = spec.trainer.number_format
        self._ranks_here = spec.trainer.processes_per_node
        self._writers: defaultdict[str, ShardWriter] = defaultdict(ShardWriter)
        self._temperature = spec.task.sampling.temperature
        self._device = compute_device(models.model)
        self._throughput = Throughput(models.model, device=self._device, precision=spec.trainer.number_format)
        for one in (models.model, models.critic):
            if one is not None:
                measure_collectives(one, clock=partial(self._throughput.during, "collectives"))
        self._switch = rope_switch(models.model.config)
        self._passes = Layout(
            packed=attends_by_document(models.model), attention_tokens=attention_tokens(models.model.config)
        )
        self._forward = Forward(models.model, temperature=self._temperature)
        self._optimiser = Optimiser(models.model, spec=spec.trainer, steps=spec.pipeline.steps)
        self._critic_optimiser = _critic_optimiser(models, spec=spec)
        self._family = str(models.model.config.model_type)
        self._probe = _probe_tokens(models, spec=spec)
        self._proved = False
        self._layout = CheckpointLayout(models.model.config)
        self._base: list[SliceBytes] | None = None  # what is not trained, this rank's slices as published
        self.begin(None)

    def layout(self, payload: None) -> Layout:
        """Return how samples lie in a pass; the same on every rank."""
        del payload
        return self._passes

    def begin(self, repeated: Payload) -> int | None:
        """A step: gradients and sums of zero. Return the tokens of a pass that fit the memory; None: as many as the job says.

        `repeated`: room and halved passes of the step that is repeated, as of `pb.PassCuts`; None: it is a new one.
        """
        self._repeated = repeated
        self._memory.begin(repeated)
        kl = self._algorithm.reference_kl
        self._sums = ForwardMetrics(self._device, estimator=kl.estimator if kl else "K3")
        self._diffs = LogprobDiff(self._device, pools=self._pools)
        self._throughput.begin()
        self._zero()
        optimisers = (optimiser for _, _, optimiser in self._states(Path()))
        return self._memory.room_tokens(owed_bytes=sum(optimiser.owed_bytes for optimiser in optimisers))

    def rehearse(self, tokens: int) -> int | None:
        """Measure a pass of so many tokens, which changes nothing, and begin."""
        positions = getattr(self._model.config, "max_position_embeddings", None) or tokens
        self._memory.rehearse(self._rehearsed, min(tokens, positions))
        return self.begin(self._repeated)

    def _rehearsed(self, lengths: Sequence[int]) -> None:
        """One pass, in both directions, of samples whose tokens are all trained but the first."""
        values = 0 if self._critic is None else self._critic.values_of_token
        vocabulary = self._model.config.get_text_config().vocab_size
        drawn = [rehearsal_sample(tokens, critic_values=values, vocabulary=vocabulary) for tokens in lengths]
        try:
            self._prepared(drawn)
            self._accumulate(drawn, policy=True, critic=True, counted=False)
        except MAY_BE_MEMORY as error:
            self._memory.halves(drawn, error, tokens=self._passes.tokens(drawn))

    def prepare(self, samples: Sequence[PackedSample]) -> list[dict[str, Payload]]:
        """What is said of each sample before the step's updates, as fields of `PackedSample`: log-probs, the reference's, values."""
        try:
            self._memory.begin_pass()
            return self._prepared(samples)
        except MAY_BE_MEMORY as error:
            halves = self._memory.halves(samples, error, tokens=self._passes.tokens(samples))
        self._free()
        return [prepared for half in halves for prepared in self.prepare(half)]

    def accumulate(self, samples: Sequence[PackedSample], *, policy: bool = True, critic: bool = True) -> None:
        """One micro-step: forward and backward, of the policy and of the critic if there is one."""
        before = self._gradient_versions()
        try:
            self._memory.begin_pass()
            self._accumulate(samples, policy=policy, critic=critic)
        except MAY_BE_MEMORY as error:
            halves = self._memory.halves(samples, error, tokens=self._passes.tokens(samples))
        else:
            self._accumulated.append((samples, policy, critic))
            return
        self._free()
        if self._gradient_versions() != before:
            self._accumulate_again()
        for half in halves:
            self.accumulate(half, policy=policy, critic=critic)

    def accumulate_policy(self, samples: Sequence[PackedSample]) -> None:
        """One micro-step of the policy alone."""
        self.accumulate(samples, critic=False)

    def accumulate_values(self, samples: Sequence[PackedSample]) -> None:
        """One micro-step of the critic alone."""
        self.accumulate(samples, policy=False)

    @torch.no_grad()
    def _prepared(self, samples: Sequence[PackedSample]) -> list[dict[str, Payload]]:
        batch = self._batch(samples)
        counts = [sample.trained for sample in samples]
        critic = self._critic
        has_copy = isinstance(critic, UtteranceValueModel)
        with self._throughput.during("forward"):
            columns = {
                "proximal_N": self._forward.logprobs(batch),
                "reference_N": self._reference_logprobs(batch),
                "values_N": None if critic is None else critic_values(critic, batch),
                "target_values_N": critic_values(critic, batch, target=True) if critic and has_copy else None,
            }
        rows = {name: _rows(column, counts=counts) for name, column in columns.items() if column is not None}
        return [{name: row[number] for name, row in rows.items()} for number in range(len(counts))]

    def update(self, update: Update) -> dict[str, float]:
        """Step the optimisers over the sums so far, and forget these."""
        self._sums.end_update(scale=update.scale, critic_scale=update.critic_scale)
        numbers = {
            "gradient_norm": 0.0,
            "learning_rate": 0.0,
            "skipped_nonfinite_steps": 0.0,
            "critic_gradient_norm": 0.0,
        }
        with self._throughput.during("optimiser"):
            if update.policy:
                numbers |= self._optimiser.step(update.step, scale=update.scale)
            if self._critic_optimiser is not None and update.critic:
                critic = self._critic_optimiser.step(update.step, scale=update.critic_scale)
                self._follow()
                numbers["critic_gradient_norm"] = critic["gradient_norm"]
                numbers["skipped_nonfinite_steps"] += critic["skipped_nonfinite_steps"]
        return numbers

    def _follow(self) -> None:
        """A critic's copy, if it has one."""
        spec = self._algorithm.critic
        if self._critic is not None and isinstance(spec, UtteranceCritic):
            self._critic.follow(spec.target_rate)

    def zero(self, payload: None) -> None:
        """Forget the gradients of an update that was made; another follows."""
        del payload
        self._zero()

    def halved(self, payload: None) -> list[int]:
        """The step's passes that were computed in halves, by number."""
        del payload
        return self._memory.halved

    def measured(self, payload: None) -> list[float]:
        """The step's sums on this rank."""
        del payload
        return self._sums.raw()

    def throughput(self, payload: None) -> dict[str, float]:
        """Clocks and counts of the step on this rank."""
        del payload
        return self._throughput.raw()

    def logprob_diffs(self, payload: None) -> list[list[float]]:
        """The step's sums by pool and version lag on this rank."""
        del payload
        return self._diffs.raw()

    def slices(self, payload: Payload) -> list[SliceBytes]:
        """Copy this rank's slices of what is published (`slices.py`); the payload is for who keeps them. What is not trained is copied once: below adapters, before a side path."""
        del payload
        if self._base is None:
            self._base = self._copied(trained=False)
        return [*self._base, *self._copied(trained=True)]

    def _copied(self, *, trained: bool) -> list[SliceBytes]:
        views = model_files.published_views(
            self._model, layout=self._layout, precision=self._precision, trained=trained
        )
        return copy_slices(views)

    def tensors(self, payload: None) -> dict[str, TensorBytes]:
        """Copy all that is published, whole, on rank 0; where names share one storage (tied embeddings), the first name stands for both."""
        del payload
        return model_files.tensors(self._model, layout=self._layout, precision=self._precision)

    def probe(self, payload: None) -> dict[str, TensorBytes]:
        """Log-probs of fixed tokens as `models/probe.py` publishes them; of rank 0, and a collective."""
        del payload
        probe = self._scored_probe()
        return {} if probe is None or rank_of() else as_tensor_bytes(probe)

    @torch.no_grad()
    def _scored_probe(self) -> pb.Probe | None:
        """One forward pass. The first time the short sequence is also passed alone: its log-probs must not change. None: no room for one."""
        if not self._probe[0]:
            return None
        short, long = (scored_sample(tokens) for tokens in self._probe)
        forward = Forward(self._model, temperature=1.0)
        # The short one comes second: in a row of documents the first sees no other in any case.
        longer, beside = torch.split(forward.logprobs(self._batch([long, short])), [long.trained, short.trained])
        if not self._proved:
            alone = forward.logprobs(self._batch([short]))
            Prover(engine="torch", precision=self._precision).prove_alone(
                alone.tolist(), beside.tolist(), family=self._family
            )
            self._proved = True
        return pb.Probe(
            family=self._family,
            short=pb.ScoredTokens(tokens=pack_int32(short.tokens), logprobs=pack_float32(beside.tolist())),
            long=pb.ScoredTokens(tokens=pack_int32(long.tokens), logprobs=pack_float32(longer.tolist())),
        )

    def save(self, directory: str) -> "Future[FileHashes]":
        """Copy models, optimisers, random state; a thread writes the copies."""
        root, writes = Path(directory), {}
        self._memory.save(root)
        for path, model, optimiser in self._states(root):
            path.mkdir(exist_ok=True)
            file = shard_path(path, rank_of())
            name = str(file.relative_to(root))
            room_bytes = free_bytes(torch.device("cpu"), ranks=self._ranks_here)  # less the copies before this one
            writes[name] = model_files.stage(
                file, model=model, optimiser=optimiser, writer=self._writers[name], room_bytes=room_bytes
            )
        return begin_in_thread(lambda: {name: write() for name, write in writes.items()}, name="trainer-saving")

    def load(self, directory: str) -> None:
        """Go back to what was saved."""
        self._base = None
        self._memory.load(Path(directory))
        for path, model, optimiser in self._states(Path(directory)):
            model_files.load(path, model=model, optimiser=optimiser)

    def export(self, directory: str) -> None:
        """As `from_pretrained` loads it."""
        model_files.export(
            Path(directory),
            model=self._model,
            published=self.tensors(None),
            tokenizer=self._tokenizer,
            precision=self._precision,
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of this rank as they are: sums before an update, scaled and clipped behind it. No call of the engine."""
        models = {"": self._model} if self._critic is None else {"": self._model, "critic.": self._critic}
        return {
            prefix + name: p.grad.clone()
            for prefix, model in models.items()
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    def _accumulate(self, samples: Sequence[PackedSample], *, policy: bool, critic: bool, counted: bool = True) -> None:
        """`counted`: in the step's sums."""
        batch = self._batch(samples)
        with self._throughput.during("forward"):
            passed = self._policy_pass(batch) if policy else None
            errors = self._value_loss(batch) if critic else None
        nothing = torch.zeros((), device=self._device)
        total = nothing if passed is None else passed[0]
        with self._throughput.during("backward"):
            torch.autograd.backward([loss for loss in (total, errors) if loss is not None and loss.requires_grad])
        if not counted:
            return
        if passed is not None:
            self._throughput.add(samples, places=batch.places)
            _, tokens, loss, entropy_N = passed
            self._sums.add(tokens, loss=loss, entropy_N=entropy_N)
            if self._algorithm.compares:
                self._diffs.add(tokens, loss=loss, samples=samples)
        self._sums.add_losses(loss=total, value_loss=nothing if errors is None else errors)

    def _policy_pass(self, batch: MicroBatch) -> tuple[torch.Tensor, TokenBatch, TokenLoss, torch.Tensor]:
        """The weighed sum of token losses, what it is of, and entropies [N]."""
        logprobs_N, entropy_N = self._forward.logprobs_entropy(batch)
        tokens = TokenBatch(
            logprobs_N=logprobs_N,
            behaviour_N=batch.behaviour_N,
            proximal_N=logprobs_N.detach() if batch.proximal_N is None else batch.proximal_N,
            advantages_N=batch.advantages_N,
            sequences_N=batch.sequences_N,
            reference_N=batch.reference_N if self._has_reference else self._reference_logprobs(batch),
            kept_N=None if batch.kept_N is None else batch.kept_N.bool(),
        )
        loss = self._algorithm.token_loss(tokens)
        return (loss.loss_N * batch.weights_N).sum(), tokens, loss, entropy_N

    def _accumulate_again(self) -> None:
        """The update's micro-steps so far; they are in the sums already."""
        self._zero_gradients()
        for samples, policy, critic in self._accumulated:
            self._accumulate(samples, policy=policy, critic=critic, counted=False)

    def _gradient_versions(self) -> list[int]:
        """Each addition to a gradient, which is made in place, changes its number."""
        models = [self._model] if self._critic is None else [self._model, self._critic]
        return [p.grad._version for model in models for p in model.parameters() if p.grad is not None]

    def _free(self) -> None:
        """Give back what a failed pass held: its error is gone by now, and with it the frames that held tensors."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, samples: Sequence[PackedSample]) -> MicroBatch:
        whole = isinstance(self._critic, UtteranceValueModel)
        with self._throughput.during("data"):
            return make_batch(
                samples or [DUMMY],
                aggregation=self._algorithm.aggregation,
                device=self._device,
                packed=self._passes.packed,
                whole=whole,
                switch=self._switch,
                context=self._context,
            )

    def _zero(self) -> None:
        self._accumulated: list[tuple[Sequence[PackedSample], bool, bool]] = []
        """Micro-steps of the update, each with what `accumulate` was told."""
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        self._optimiser.zero()
        if self._critic_optimiser is not None:
            self._critic_optimiser.zero()

    @property
    def _is_prepared(self) -> bool:
        """Whether samples come with what `prepare` said of them. The same on every rank, also on one that has a dummy: passes are collectives."""
        return self._algorithm.needs == "batch" or self._algorithm.mask is not None

    @property
    def _has_reference(self) -> bool:
        """Whether samples come with the frozen model's log-probs. The same on every rank."""
        return self._is_prepared or self._reference is None

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with self._reference() as model:
            return Forward(model, temperature=self._temperature).logprobs(batch)

    def _value_loss(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._critic is None:
            return None
        assert self._algorithm.critic is not None, "a critic that the algorithm did not ask for"
        assert batch.values_N is not None, "samples that were not prepared"
        assert batch.returns_N is not None, "samples without estimates"
        errors_N = value_loss(
            critic_values(self._critic, batch),
            start_N=batch.values_N,
            returns_N=batch.returns_N,
            value_clip=self._algorithm.critic.value_clip,
            expectiles_H=[self._algorithm.expectile] * self._critic.states + [0.5] * self._critic.utterances,
        )
        return errors_N.sum()

    def _states(self, directory: Path) -> Iterator[tuple[Path, torch.nn.Module, Optimiser]]:
        yield directory, self._model, self._optimiser
        if self._critic is not None and self._critic_optimiser is not None:
            yield directory / _CRITIC_FOLDER, self._critic, self._critic_optimiser


def _probe_tokens(models: RankModels, *, spec: RLJobSpec) -> tuple[list[int], list[int]]:
    """Return the tokens by which a generator's first load is proved: of a text, or of a small vocabulary in some order."""
    if not spec.generators:
        return [], []
    config = models.model.config.get_text_config(decoder=True)
    tokenizer: Any = models.tokenizer
    rows = models.model.get_input_embeddings().get_parameter("weight").shape[0]
    known = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    try:
        text = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"] if len(known) >= TEXT_VOCABULARY else ()
    except Exception:  # noqa: BLE001 - the tokenizers' Rust raises a bare one for a character that it does not know
        text = ()
    switches = (rope_switch(models.model.config), getattr(config, "sliding_window", None))
    return probe_tokens(
        [token for token in text or random.Random(0).choices(known, k=2 * LONG_TOKENS) if token < rows],
        begin=tokenizer("")["input_ids"],
        limit_tokens=getattr(config, "max_position_embeddings", None) or LONG_TOKENS + 1,
        switches=[switch for switch in switches if switch],
        most_tokens=spec.trainer.micro_batch_tokens // 2,
        reach_tokens=max(spec.task.sampling.max_tokens, *(task.most_tokens for task in spec.task.tasks)),
    )


def _critic_optimiser(models: RankModels, *, spec: RLJobSpec) -> Optimiser | None:
    """As the policy's, with a learning rate of its own."""
    if models.critic is None or models.algorithm.critic is None:
        return None
    trainer = spec.trainer.model_copy(update={"learning_rate": models.algorithm.critic.learning_rate})
    return Optimiser(models.critic, spec=trainer, steps=spec.pipeline.steps)


def _rows(values_N: torch.Tensor, *, counts: Sequence[int]) -> list["array[float]"]:
    """The numbers of each sample, as many of each token."""
    flat, begin, rows = array("f", values_N.float().tolist()), 0, []
    each = len(flat) // max(1, sum(counts))
    for count in (count * each for count in counts):
        rows.append(flat[begin : begin + count])
        begin += count
    return rows
