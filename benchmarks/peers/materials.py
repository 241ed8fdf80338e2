"""What both sides of the comparison start from: TRL's environment, warmed-up models, files of prompts.

All of it is kept in `~/.cache/streamrl/peers` and made again when missing. TRL never becomes a dependency of the project.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import COUNT_SIGMA, LARGEST_COUNT, MEDIAN_COUNT, countdowns

if TYPE_CHECKING:
    from streamrl.spec import RLJobSpec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl" / "peers"

_SKEWED_PROMPTS = 40_000
_WARM_UP_STEPS, _WARM_UP_BATCH, _WARM_UP_RATE = 900, 32, 2e-3
_LENGTH_CLASSES = 16
"""Warm-up batches are of alike lengths: one long text would pad 63 short ones. So many are sorted together."""
_POSITIONS = 544
"""Prompt and 512 tokens."""


def trl_python() -> Path:
    """The interpreter of TRL's environment; installed when it is not there."""
    folder = CACHE / "trl"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        uv = str(Path(sys.executable).parent / "uv")
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
        packages = ["--constraint", str(ROOT / "constraints.txt"), "trl"]
        subprocess.run([uv, "pip", "install", "--python", str(python), "--compile-bytecode", *packages], check=True)
        (folder / ".installed").touch()
    return python


def short_materials(job: Path, *, prompts: int) -> tuple[Path, Path]:
    """Model folder and prompts file of the short task, as StreamRL's own job makes them."""
    model, file, _ = job_materials(job, name="short", prompts=prompts)
    return model, file


def job_materials(
    job: Path, *, name: str, changes: Sequence[str] = (), prompts: int | None = None
) -> tuple[Path, Path, "RLJobSpec"]:
    """Model folder, prompts file (absent = all steps') and specification of a job whose model is made from scratch."""
    from streamrl_cli.jobfile import load_job
    from streamrl_workers.models.prepare import prepare
    from streamrl_workers.tasks.dataset import open_dataset

    spec = load_job(job, overrides=changes).spec
    prompts = prompts or spec.pipeline.steps * spec.pipeline.batch_groups
    model = prepare(spec, cache_dir=CACHE / "models", base_dir=HERE, report=lambda _: None)
    file = CACHE / f"{name}-{spec.seed}-{prompts}.jsonl"
    if not file.exists():
        dataset = open_dataset(spec.task, seed=spec.seed, base_dir=HERE)
        items = (dataset.item("train", index) for index in range(prompts))
        _write(file, ({"prompt": item.prompt, "answer": item.answer} for item in items))
    return model, file, spec


def skewed_materials() -> tuple[Path, Path]:
    """Model folder and prompts file of the skewed task."""
    file = CACHE / f"skewed-{_SKEWED_PROMPTS}-{MEDIAN_COUNT}-{COUNT_SIGMA}-{LARGEST_COUNT}.jsonl"
    if not file.exists():
        pairs = itertools.islice(countdowns(seed=1), _SKEWED_PROMPTS)
        _write(file, ({"prompt": prompt, "answer": answer} for prompt, answer in pairs))
    recipe = f"{MEDIAN_COUNT}-{COUNT_SIGMA}-{LARGEST_COUNT}-{_WARM_UP_STEPS}x{_WARM_UP_BATCH}x{_WARM_UP_RATE}"
    model = CACHE / "models" / f"countdown-{recipe}"
    if not model.exists():
        _make_countdown_model(model)
    return model, file


def _make_countdown_model(folder: Path) -> None:
    import torch

    from streamrl.spec.model import ScratchModel
    from streamrl_workers.models.scratch import build_model, build_tokenizer
    from streamrl_workers.models.warm_up import warm_up

    torch.set_num_threads(os.cpu_count() or 1)
    spec = ScratchModel.model_validate(
        {
            **{"hiddenSize": 128, "layers": 4, "heads": 4, "intermediateSize": 512, "maxPositions": _POSITIONS},
            "warmUp": {"steps": _WARM_UP_STEPS, "batchSize": _WARM_UP_BATCH, "learningRate": _WARM_UP_RATE},
        }
    )
    letters = set("abcdefghijklmnopqrstuvwxyz0123456789: ")
    tokenizer = build_tokenizer(letters, max_positions=_POSITIONS)
    model = build_model(spec, tokenizer=tokenizer, seed=0)
    for progress in warm_up(model, tokenizer=tokenizer, pairs=_alike_pairs(), spec=spec.warm_up):
        if progress.step % 50 == 0:
            print(f"warm-up of the countdown model: step {progress.step}, loss {progress.loss:.4f}", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _alike_pairs() -> Iterator[object]:
    """Batches of alike lengths in random order."""
    import random

    from streamrl_workers.models.warm_up import WarmUpPair

    source, draw = countdowns(seed=2), random.Random(3)
    while True:
        pairs = sorted(itertools.islice(source, _LENGTH_CLASSES * _WARM_UP_BATCH), key=lambda pair: len(pair[1]))
        batches = [pairs[at : at + _WARM_UP_BATCH] for at in range(0, len(pairs), _WARM_UP_BATCH)]
        draw.shuffle(batches)
        yield from (WarmUpPair(prompt=prompt, target=target) for batch in batches for prompt, target in batch)


def _write(file: Path, records: Iterator[dict[str, str | None]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    beside.rename(file)
