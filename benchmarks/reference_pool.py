"""What a pool for the frozen model takes from the trainer: the same job with the model in the trainer, and with `trainer.reference`.

    python benchmarks/reference_pool.py [--steps 20] [--groups 64] [--rounds 3]

The README's job with a pull to its initial model, and a model of 1.7 M parameters, so that a pass of the frozen one counts. The variants
take turns. Prints for each run, from the third step on: samples/s, and seconds of a processor that the trainer and the pool took for a
thousand samples. On a machine with other work only the seconds are worth something.
"""

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from run_folders import EXAMPLE, read_run, start

from streamrl_workers.metrics.jsonl import read_jsonl

SIZES = ("hiddenSize=192", "layers=4", "intermediateSize=512", "warmUp.steps=200")
POOLS = "[{name: local, engine: {hf: {slots: 128}}}, {name: frozen, engine: {hf: {slots: 64}}}]"
VARIANTS: Mapping[str, Sequence[str]] = {
    "within the trainer": (),
    "a pool": (f"spec.generators={POOLS}", "spec.trainer.reference={pool: frozen}"),
}
FIRST = 3
PROCESSES = ("trainer-0", "generator-frozen-0", "generator-local-0")
POLL_S = 0.2


class ProcessorClock(threading.Thread):
    """Seconds of a processor that each process of a run has taken, between the third step and the newest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="processor clock")
        self._folder = folder
        self._ended = threading.Event()
        self._first: dict[str, tuple[int, float]] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            samples = [line["samples"] for line in read_jsonl(self._folder / "metrics" / "steps.jsonl")]
            for name in PROCESSES if len(samples) >= FIRST else ():
                if (seconds := self._seconds(name)) is not None:
                    self._last[name] = sum(samples), seconds
                    self._first.setdefault(name, self._last[name])

    def end(self) -> dict[str, float]:
        """Seconds for a thousand samples, by process."""
        self._ended.set()
        self.join()
        found = {}
        for name, (samples, seconds) in self._last.items():
            before, began = self._first[name]
            found[name] = 1000 * (seconds - began) / (samples - before)
        return found

    def _seconds(self, name: str) -> float | None:
        try:
            pid = json.loads((self._folder / "endpoints" / f"{name}.json").read_text())["pid"]
            times = psutil.Process(pid).cpu_times()
        except (OSError, ValueError, psutil.Error):
            return None
        return float(times.user + times.system)


def main() -> None:
    """Run them, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=64, help="a step")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    fixed = (
        "spec.task.evaluation={maxPrompts: 8, intervalSteps: 1000}",
        f"spec.pipeline.batchGroups={args.groups}",
        "spec.algorithm={grpo: {referenceKl: {coefficient: 0.001}}}",
        f"spec.pipeline.steps={args.steps}",
        *(f"spec.model.scratch.{size}" for size in SIZES),
    )
    rows: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for number in range(args.rounds):
        for name, changes in VARIANTS.items():
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "run"
                clock = ProcessorClock(folder)
                clock.start()
                start(EXAMPLE, folder=folder, changes=[*fixed, *changes])
                took = clock.end()
                row = [read_run(folder).samples_per_s, *(took.get(process, 0.0) for process in PROCESSES)]
            rows[name].append(row)
            print(f"| {number} | {name} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)
    for name, some in rows.items():
        medians = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*some, strict=True))
        print(f"| median | {name} | {medians} |")


if __name__ == "__main__":
    main()
