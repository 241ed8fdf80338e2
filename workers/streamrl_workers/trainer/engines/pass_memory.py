"""How many tokens a pass of this rank may have: measured before the first step, lowered where the memory ran out.

Owns: the measurement, the tokens that fit, what follows an error of memory. Does not own: which samples go into a pass (`packing.py`),
the estimate before the model is loaded (`memory.py`).

- Measured. Passes that change nothing give a pass of n tokens as `fixed + n * token` bytes: one of two tokens, one of the longest sample, one of
  short samples, whose attention works on copies where their lengths differ. The larger share of a token counts. At the begin of each step a rank answers how many tokens fit what is free, and rank 0 packs for the rank
  that has least room: so all ranks cut alike, before a pass. On a processor nothing is measured: the kernel promises more than it has, and
  ends the process instead of raising an error.
- Ran out, on a rank whose weights are its own: the pass is computed in halves, at once. Later steps get half its tokens; checkpoints hold that limit.
- Ran out among shards: the other ranks wait in a collective, so the group restarts from its checkpoint. This rank keeps half the tokens of the
  pass in its run folder, and answers with them from then on. The second time the run ends with the setting to change.
- A sample that does not fit alone will not fit a new process: the run ends at once.
- Repeated. Room and halves of each step are recorded with it. A step that is repeated takes those instead of what is measured, so its bits are
  the same; a limit after an error of memory is kept to all the same.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl.keys import DIR_MEMORY
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.models.documents import SHORT_TOKENS
from streamrl_workers.stream.packing import count_32
from streamrl_workers.stream.run_folder import write_json_atomically
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.engines.packing import PackedSample
from streamrl_workers.trainer.engines.sharding import rank_of, sharded

_SPARE = 0.95
"""Share of the free memory to count on: the allocator's blocks do not fit together without gaps."""
_FILE = "memory.json"
"""In a checkpoint: the limit of a rank whose weights are its own."""
_FEWEST_TOKENS = 2
"""Tokens of the smaller pass that is measured."""
_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch's allocators and libraries write into a plain RuntimeError."""

MAY_BE_MEMORY = (RuntimeError, MemoryError)
"""Errors of a pass to ask `PassMemory.halves` about; torch's own is a RuntimeError."""

log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory did not suffice, on a GPU or on a processor."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _uneven(tokens: int) -> list[int]:
    """Return lengths of short samples, at most `tokens` in all: every second one is half as long, so each call of the attention pads."""
    width = min(SHORT_TOKENS, tokens // 2)
    return [width >> number % 2 for number in range(tokens // width)] if width >= 2 * _FEWEST_TOKENS else []


def _inputs(lengths: Sequence[int]) -> int:
    """Return the tokens of a pass: all but the last one of each sample."""
    return sum(lengths) - len(lengths)


class DeviceMemory(Protocol):
    """The allocator of a device."""

    def used_bytes(self) -> int:
        """Bytes of all tensors that live."""

    def reset_peak(self) -> None:
        """Measure the peak from now on."""

    def peak_bytes(self) -> int:
        """Largest `used_bytes` since the last reset."""

    def free_bytes(self) -> int:
        """Bytes that new tensors may take."""


class CudaMemory:
    """The caching allocator of torch; what it holds in reserve is free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used_bytes(self) -> int:
        """Bytes of all tensors that live."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Largest `used_bytes` since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def free_bytes(self) -> int:
        """Bytes that new tensors may take."""
        return (
            int(torch.cuda.mem_get_info(self._device)[0]) + torch.cuda.memory_reserved(self._device) - self.used_bytes()
        )


def longest_tokens(samples: Sequence[pb.Sample], *, spec: RLJobSpec) -> int:
    """Tokens of the longest sample to expect: the longest prompt of these, and an answer as long as the job allows, or as they have."""
    prompt = max((count_32(sample.prompt_tokens) for sample in samples), default=1)
    answer = max((count_32(sample.tokens) for sample in samples), default=1)
    if spec.algorithm.supervised is not None:
        return prompt + answer
    return prompt + max(answer, *(task.sampling.max_tokens for task in spec.task.tasks))


class PassMemory:
    """What this rank knows of the memory of its passes."""

    def __init__(self, *, spec: RLJobSpec, device: DeviceMemory | None, run_dir: Path | None) -> None:
        """`device`: None where nothing is measured. `run_dir`: where the limit of a restarted group lies; None: nowhere."""
        self._settings = hashlib.sha256(spec.trainer.model_dump_json().encode()).hexdigest()
        self._checkpoints_activations = spec.trainer.activation_checkpointing
        self._device = device
        self._path = None if run_dir is None else run_dir / DIR_MEMORY / f"{rank_of()}.json"
        self._limit_tokens = self._kept(self._path)
        self._restarted = self._limit_tokens is not None
        self._fixed_bytes = self._token_bytes = 0.0
        self.begin(None)

    def begin(self, repeated: tuple[int, Sequence[int]] | None) -> None:
        """Begin a step. `repeated`: room (0: without a limit) and halved passes of the step that it repeats; None: it is a new one."""
        self._repeated_tokens = None if repeated is None else repeated[0]
        self._repeated_halves = () if repeated is None else repeated[1]
        self._passes = 0
        self.halved: list[int] = []
        """Passes of the step that were computed in halves, by number."""

    def begin_pass(self) -> None:
        """Count a pass. Raises MemoryError where the step that is repeated computed it in halves."""
        self._passes += 1
        if self._passes in self._repeated_halves and not sharded():
            raise MemoryError("the step that is repeated computed this pass in halves")

    def rehearse(self, work: Callable[[Sequence[int]], None], tokens: int) -> None:
        """Measure `work`, a pass of samples of the lengths that it is given. An error of memory is `work`'s to raise."""
        if self._device is None or tokens <= _FEWEST_TOKENS:
            return
        fewest = self._peak(work, [_FEWEST_TOKENS])
        shapes = [lengths for lengths in ([tokens], _uneven(tokens // 2)) if _inputs(lengths) > 1]
        self._token_bytes = max(
            0.0, *((self._peak(work, lengths) - fewest) / (_inputs(lengths) - 1) for lengths in shapes)
        )
        self._fixed_bytes = max(0.0, fewest - self._token_bytes)
        log.info("passes of up to %d tokens were rehearsed: %.0f bytes a token", tokens, self._token_bytes)

    def room_tokens(self, *, owed_bytes: int) -> int | None:
        """Tokens of a pass that fits what is free; None: as many as the job says. `owed_bytes`: of what the next update allocates to stay."""
        limits = [] if self._limit_tokens is None else [self._limit_tokens]
        if self._repeated_tokens is not None:
            limits += [self._repeated_tokens] * (self._repeated_tokens > 0)
        elif self._device is not None and self._token_bytes:
            free = self._device.free_bytes() * _SPARE - owed_bytes - self._fixed_bytes
            limits.append(max(1, int(free / self._token_bytes)))
        return min(limits, default=None)

    def halves(self, samples: Sequence[PackedSample], error: Exception, *, tokens: int) -> list[Sequence[PackedSample]]:
        """Return the halves of a pass of `tokens` (padding included) whose memory did not suffice.

        Raises:
            UserError: a sample alone does not fit, or the group has restarted already.
            RetryError: the group must restart, with passes of half the tokens.
            Exception: `error`, if it is not of memory.
        """
        if not is_out_of_memory(error):
            raise error
        what = f"a pass of {tokens} tokens ({len(samples)} samples)"
        if not samples:
            raise self._too_little() from error
        if len(samples) == 1:
            raise self._too_long(tokens) from error
        if not sharded():
            log.warning("%s did not fit the memory: computed in two; lower spec.trainer.microBatchTokens", what)
            self._limit_tokens = min(tokens // 2, self._limit_tokens or tokens)
            self.halved.append(self._passes)
            middle = len(samples) // 2
            return [samples[:middle], samples[middle:]]
        if self._restarted or self._path is None:
            raise UserError(
                field="spec.trainer.microBatchTokens",
                rule=f"is more than the memory of rank {rank_of()} holds: {what} did not fit",
                fix=f"lower it{self._or_less()}",
            ) from error
        self._keep(self._path, tokens=tokens // 2)
        raise RetryError(
            f"{what} did not fit the memory of rank {rank_of()}: restarting with passes of {tokens // 2} tokens; "
            "lower spec.trainer.microBatchTokens"
        ) from error

    def _peak(self, work: Callable[[Sequence[int]], None], lengths: Sequence[int]) -> int:
        """Bytes that a pass takes at its peak, beside what lives before it."""
        assert self._device is not None, "nothing is measured here"
        self._device.reset_peak()
        before = self._device.used_bytes()
        work(lengths)
        return self._device.peak_bytes() - before

    def _too_long(self, tokens: int) -> UserError:
        return UserError(
            field="spec.task.sampling.maxTokens",
            rule=f"allows samples that the memory of rank {rank_of()} does not hold: one of {tokens} tokens did not fit alone",
            fix=f"lower it{self._or_less()}",
        )

    def _too_little(self) -> UserError:
        return UserError(
            field="spec.trainer",
            rule=f"needs more memory than rank {rank_of()} has: beside the model, a pass without a sample did not fit",
            fix="raise spec.trainer.processesPerNode or nodes, or set spec.trainer.lora",
        )

    def _or_less(self) -> str:
        return "" if self._checkpoints_activations else ", or set spec.trainer.activationCheckpointing"

    def save(self, directory: Path) -> None:
        """Keep the limit in a checkpoint. Among shards it is in the run folder."""
        if self._limit_tokens is not None and not sharded():
            self._keep(directory / _FILE, tokens=self._limit_tokens)

    def load(self, directory: Path) -> None:
        """Go back to what `save` kept."""
        if not sharded():
            self._limit_tokens = self._kept(directory / _FILE)

    def _kept(self, path: Path | None) -> int | None:
        """The limit in a file, if it is of the same settings of the trainer."""
        if path is None or not path.exists():
            return None
        found = read_json(path)
        return int(found["tokens"]) if found["settings"] == self._settings else None

    def _keep(self, path: Path, *, tokens: int) -> None:
        write_json_atomically(path, {"tokens": tokens, "settings": self._settings})
