"""Samples that are trained again: the replay buffer of an algorithm that samples of any policy teach. Pure; no torch.

    groups of a step ─▶ trained, once ─▶ ADMIT ─▶ samples by prompt ─▶ DRAW ─▶ groups that a later step trains besides its own

Owns: what is kept, what is drawn, its part of the checkpoint. Lives on rank 0. Does not own: which groups a step takes from the scheduler.
These are in the journal once, and a sample enters the buffer with the step that has it there; draws are counted in the step's metrics.

Invariants:
- Kept and drawn samples follow from seed, steps and groups, not from the order of arrival: who resumes draws the same.
- A step draws from what the steps before it left. An unfinished step changes nothing.
- Of one prompt (ArCHer: of all) there are at most `capacity` samples, no two with the same tokens (ArCHer: name); tokens and log-probs of all together are at most
  `maxBytes`. The oldest leave. Who drew a sample, and in which attempt, is not counted: it follows from deaths.
"""

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec, parse_bytes
from streamrl.spec.algorithm import ArcherSpec, EpisodeReplay, Replay
from streamrl_workers.stream.messages import STATES_BYTES
from streamrl_workers.stream.packing import tokens_hash
from streamrl_workers.stream.segments import segments

REPLAYED = 1 << 63
"""Groups of replayed samples have numbers from here on: no group of the scheduler has one."""
_FILE = "replay.bin"
_RECORD = struct.Struct("<QII")
"""Before each sample in the file: step, reuses, bytes."""
_LEAST = 1e-300
"""Keeps a logarithm finite."""
_NOT_TRAINED_ON = ("reward_parts", "reward_error", "generate_s", "ended_at")
"""Fields of a sample that training does not read."""


@dataclass(slots=True, kw_only=True)
class _KeptSample:
    data: bytes  # a pb.Sample
    size_bytes: int  # of its tokens and log-probs
    reward: float
    step: int  # that trained it first
    reuses: int = 0


class ReplayBuffer:
    """The samples of one run that may be trained again."""

    def __init__(self, spec: Replay | EpisodeReplay, *, job: RLJobSpec) -> None:
        self._spec = spec
        self._seed, self._batch_groups, self._group_size = job.seed, job.pipeline.batch_groups, job.task.group_size
        self._max_bytes = parse_bytes(spec.max_bytes)
        self.clear()

    def clear(self) -> None:
        """As at the start of a run."""
        self._samples: dict[tuple[bytes, bytes], _KeptSample] = {}  # by prompt and tokens, oldest first
        self._prompts: dict[bytes, dict[bytes, _KeptSample]] = {}  # the same by prompt
        self._bytes = 0
        self._drawn: list[list[_KeptSample]] = []

    def draw(self, step: int) -> list[pb.Group]:
        """The groups that `step` trains besides its own."""
        self._drawn = self._draw(self._due(step), rng=random.Random(f"{self._seed}/{step}/replay"))
        return [_group(REPLAYED + number, kept, step=step) for number, kept in enumerate(self._drawn)]

    def admit(self, step: int, samples: Sequence[pb.Sample]) -> dict[str, float]:
        """Keep the samples of `step`, which is done, and count what it drew; the step's numbers."""
        drawn = [kept for group in self._drawn for kept in group]
        for kept in drawn:
            kept.reuses += 1
        for sample in sorted(samples, key=lambda one: (one.group_id, one.sample_index)):
            self._keep(_trained_on(sample), step=step)
        return {
            "replayed_groups": float(len(self._drawn)),
            "replayed_samples": float(len(drawn)),
            "replay_age_mean": sum(step - kept.step for kept in drawn) / max(1, len(drawn)),
            "replay_reuses_mean": sum(kept.reuses for kept in drawn) / max(1, len(drawn)),
            "replay_reuses_max": float(max((kept.reuses for kept in drawn), default=0)),
            "replay_buffer_samples": float(len(self._samples)),
            "replay_buffer_bytes": float(self._bytes),
        }

    def states(self, step: int) -> list[pb.TurnState]:
        """Where turns are to be drawn anew, behind `step`."""
        del step
        return []

    def save(self, directory: Path) -> None:
        """Write all of it into a checkpoint."""
        with (directory / _FILE).open("wb") as file:
            for kept in self._samples.values():
                file.write(_RECORD.pack(kept.step, kept.reuses, len(kept.data)))
                file.write(kept.data)

    def load(self, directory: Path) -> None:
        """Go back to what `save` wrote; empty where the checkpoint is of a job without replay."""
        self.clear()
        if not (directory / _FILE).exists():
            return
        with (directory / _FILE).open("rb") as file:
            while head := file.read(_RECORD.size):
                step, reuses, size = _RECORD.unpack(head)
                self._keep(file.read(size), step=step, reuses=reuses)

    def _draw(self, groups: int, *, rng: random.Random) -> list[list[_KeptSample]]:
        """So many of different prompts, or as many as there are."""
        ready = sorted(prompt for prompt, kept in self._prompts.items() if len(kept) > 1)
        prompts = rng.sample(ready, min(groups, len(ready)))
        return [self._chosen(list(self._prompts[prompt].values()), rng=rng) for prompt in prompts]

    def _names(self, sample: pb.Sample) -> tuple[bytes, bytes]:
        """Samples of one first name are kept together, and one of each pair of names."""
        return tokens_hash(sample.prompt_tokens), tokens_hash(sample.tokens)

    def _due(self, step: int) -> int:
        """Groups that `step` is to draw, so that the share is exact over the run."""
        share = self._spec.share_percent
        before, now = (steps * self._batch_groups * share // (100 - share) for steps in (step, step + 1))
        return now - before

    def _chosen(self, kept: Sequence[_KeptSample], *, rng: random.Random) -> list[_KeptSample]:
        """As many as a group has; by reward: drawn without putting back, with weights exp(reward)."""
        assert isinstance(self._spec, Replay)
        if self._spec.by == "Recency":
            return list(kept[-self._group_size :])
        keys = [one.reward - math.log(max(rng.expovariate(1.0), _LEAST)) for one in kept]  # Gumbel's trick
        best = sorted(range(len(kept)), key=lambda place: -keys[place])[: self._group_size]
        return [kept[place] for place in sorted(best)]

    def _keep(self, data: bytes, *, step: int, reuses: int = 0) -> None:
        """One more, the newest; one of the same tokens goes."""
        sample = pb.Sample.FromString(data)
        size_bytes = (
            len(sample.prompt_tokens) + len(sample.tokens) + len(sample.logprobs) + len(sample.reference_logprobs)
        )
        if size_bytes > self._max_bytes:
            return
        prompt, tokens = self._names(sample)
        if (prompt, tokens) in self._samples:
            reuses += self._remove(prompt, tokens).reuses
        kept = _KeptSample(data=data, size_bytes=size_bytes, reward=sample.reward, step=step, reuses=reuses)
        self._samples[prompt, tokens] = self._prompts.setdefault(prompt, {})[tokens] = kept
        self._bytes += size_bytes
        if len(self._prompts[prompt]) > self._spec.capacity:
            self._remove(prompt, next(iter(self._prompts[prompt])))
        while self._bytes > self._max_bytes:
            self._remove(*next(iter(self._samples)))

    def _remove(self, prompt: bytes, tokens: bytes) -> _KeptSample:
        kept = self._samples.pop((prompt, tokens))
        del self._prompts[prompt][tokens]
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        self._bytes -= kept.size_bytes
        return kept


class EpisodeBuffer(ReplayBuffer):
    """Samples for an off-policy critic: each is as likely to be drawn, and equal ones stay as often as they were seen."""

    def __init__(self, spec: ArcherSpec, *, job: RLJobSpec) -> None:
        super().__init__(spec.replay, job=job)
        self._resampled_percent = 0 if spec.resample is None else spec.resample.share_percent

    def states(self, step: int) -> list[pb.TurnState]:
        """For each group that the next step may make of one, as far as they fit: any sample, any turn of its first context."""
        rng, kept = random.Random(f"{self._seed}/{step}/states"), list(self._samples.values())
        due = -(-self._batch_groups * self._resampled_percent // 100) if kept else 0
        drawn = (_turn_state(pb.Sample.FromString(rng.choice(kept).data), rng=rng) for _ in range(due))
        states, left_bytes = [], STATES_BYTES
        for state in drawn:
            left_bytes -= state.ByteSize()
            if left_bytes < 0:
                break
            states.append(state)
        return states

    def _draw(self, groups: int, *, rng: random.Random) -> list[list[_KeptSample]]:
        kept = list(self._samples.values())
        drawn = rng.sample(kept, min(groups * self._group_size, len(kept)))
        return [drawn[begin : begin + self._group_size] for begin in range(0, len(drawn), self._group_size)]

    def _names(self, sample: pb.Sample) -> tuple[bytes, bytes]:
        return b"", b"%d/%d" % (sample.group_id, sample.sample_index)


def create_replay(job: RLJobSpec) -> ReplayBuffer | None:
    """The job's, if it has one."""
    if job.algorithm.archer is not None:
        return EpisodeBuffer(job.algorithm.archer, job=job)
    algorithm = job.algorithm.trajectory_balance
    if algorithm is None or algorithm.replay is None:
        return None
    return ReplayBuffer(algorithm.replay, job=job)


def _trained_on(sample: pb.Sample) -> bytes:
    kept = pb.Sample()
    kept.CopyFrom(sample)
    for name in _NOT_TRAINED_ON:
        kept.ClearField(name)
    return kept.SerializeToString(deterministic=True)


def _group(group_id: int, kept: Sequence[_KeptSample], *, step: int) -> pb.Group:
    group = pb.Group(group_id=group_id, step=step, samples=[pb.Sample.FromString(one.data) for one in kept])
    for index, sample in enumerate(group.samples):
        sample.group_id, sample.sample_index = group_id, index
    return group


def _turn_state(sample: pb.Sample, *, rng: random.Random) -> pb.TurnState:
    begins, place = [], 0
    for segment in takewhile(lambda one: not one.context, segments(sample)):
        begins += [place] * (not segment.observation)
        place += segment.tokens
    tokens = sample.tokens[: 4 * rng.choice(begins)]
    return pb.TurnState(prompt_index=sample.group_id, tokens=tokens, prompt_hash=tokens_hash(sample.prompt_tokens))
