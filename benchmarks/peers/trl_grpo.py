"""TRL's GRPOTrainer on one task of the comparison. Runs in TRL's own environment, started by `compare.py`.

    python trl_grpo.py SETTINGS.json

Settings are those of `TrlRun`. Each rank appends one JSON line per optimiser step to `<output>.<rank>.jsonl`: the time
since its start, samples, tokens (the end token included), sum of rewards, longest answer. The model is saved as `<output>.model`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BORN_S = time.monotonic()
"""Before the heavy imports: they belong to the time until the first step."""

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tasks import REWARDS  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback, TrainerState  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRun:
    """What `compare.py` asks for."""

    task: str  # a key of `REWARDS`
    model: str  # folder
    prompts: str  # JSON lines of {"prompt", "answer"}, in the order of training
    output: str  # prefix of the metrics files
    group_size: int
    batch_groups: int
    max_tokens: int
    steps: int
    learning_rate: float
    warm_up_steps: int
    seed: int
    threads: int  # of each rank
    micro_batch: int  # samples of one forward and backward pass of a rank
    continuous: dict[str, Any] | None  # sizes of transformers' continuous batching; None = model.generate
    record: str | None = None  # file for what the first step saw and did (`same_batch.py`)


class Meter(TrainerCallback):
    """Counts what the reward function sees; writes a line at each step's end."""

    def __init__(self, run: TrlRun) -> None:
        self._file = Path(f"{run.output}.{os.environ.get('RANK', '0')}.jsonl")
        self._judge = REWARDS[run.task]
        self._clear()

    def _clear(self) -> None:
        self._samples = self._tokens = self._longest = 0
        self._reward = 0.0

    def reward(
        self,
        *,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: object,
    ) -> list[float]:
        """The task's reward, as TRL calls it."""
        values = [
            self._judge(prompt=prompt, completion=completion, answer=right, metadata={})
            for prompt, completion, right in zip(prompts, completions, answer, strict=True)
        ]
        lengths = [len(ids) for ids in completion_ids]
        self._samples += len(values)
        self._tokens += sum(lengths)
        self._longest = max(self._longest, *lengths)
        self._reward += sum(values)
        return values

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """One line."""
        line = {
            "step": state.global_step,
            "elapsed_s": time.monotonic() - _BORN_S,
            "cpu_s": time.process_time(),
            "samples": self._samples,
            "tokens": self._tokens,
            "reward_sum": self._reward,
            "longest": self._longest,
        }
        with self._file.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        self._clear()


class Recorder(GRPOTrainer):
    """Writes what its first step was given, its loss and its gradient; `file` is set behind the creation."""

    file = ""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's."""
        loss = super()._compute_loss(model, inputs)
        if self.file and self.state.global_step == 0:
            batch = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            batch["loss"] = loss.detach()
            self.passes = [*getattr(self, "passes", []), batch]
        return loss

    def training_step(self, *args: Any, **settings: Any) -> torch.Tensor:  # noqa: ANN401 - transformers'
        """Transformers', and the gradient as it is behind it: not yet clipped."""
        answer = super().training_step(*args, **settings)
        if self.file and self.state.global_step == 0:
            gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
            torch.save({"passes": self.passes, "gradients": gradients}, self.file)
        return answer


def main() -> None:
    """Train."""
    run = TrlRun(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(run.threads)
    meter = Meter(run)
    lines = Path(run.prompts).read_text(encoding="utf-8").splitlines()[: run.steps * run.batch_groups]
    trainer = Recorder(
        model=run.model,
        processing_class=AutoTokenizer.from_pretrained(run.model, padding_side="left"),
        reward_funcs=meter.reward,
        args=config(run),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[meter],
    )
    trainer.file = run.record or ""
    trainer.create_optimizer()
    rise = max(1, run.warm_up_steps)  # transformers' own begins with a step at a rate of zero
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: min(1.0, (step + 1) / rise))
    trainer.train()
    trainer.save_model(f"{run.output}.model")


def config(run: TrlRun) -> GRPOConfig:
    """Our job's settings in TRL's words, with nothing switched on that costs time."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    samples = run.batch_groups * run.group_size
    return GRPOConfig(
        output_dir=f"{run.output}.trl",
        max_steps=run.steps,
        seed=run.seed,
        # The batch: one generation for each optimiser step.
        num_generations=run.group_size,
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=samples // (run.micro_batch * ranks),
        num_iterations=1,
        shuffle_dataset=False,
        # Sampling.
        max_completion_length=run.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        use_transformers_continuous_batching=run.continuous is not None,
        transformers_continuous_batching_config=run.continuous,
        # The rule: GRPO's own loss, clip 0.2, no reference model.
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        # The optimiser.
        learning_rate=run.learning_rate,
        weight_decay=0.0,
        max_grad_norm=1.0,
        # Speed.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"ddp_backend": "gloo"} if ranks > 1 else {}),
    )


if __name__ == "__main__":
    main()
