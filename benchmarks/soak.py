"""A long run at full speed: does anything grow, and do the numbers stay exact?

    python benchmarks/soak.py [--steps 4000] [--generators 3] [--kills 6] [--keep FOLDER]

`streamrl run` with simulated parts that take no time: every process is real, every step goes through scheduler, journal,
trainer, weights and checkpoints. A step is 256 samples: the default is about a million, what two hours of 140 samples/s
are. On the way generators, trainer and scheduler are killed in turn. Prints resident memory of each process and the
size of the journal by tenths of the run, and judges:

- memory of every process: no tenth of the second half more than 10 % above the fifth one;
- journal and its write-ahead log: the same rule, for the largest size in a tenth;
- bubble parts: add up to the wall within 1 % in each line of each process, and the wall follows the clock within 1 %;
- `streamrl journal check`: exact.

Exit code 1 if one of them fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from run_folders import simulated_job

from streamrl import keys

GROUP_SIZE, BATCH_GROUPS = 8, 32
PROMPTS = 5_000
READ_S = 0.5
"""Between two readings of memory and sizes."""
TENTHS, MIDDLE = 10, 4
FLAT = 1.10
"""The last half stays within 10 % of the middle."""
EXACT = 0.01
"""Of the wall."""
MIN_WALL_S = 2.0
"""Clocks of shorter lives are not compared: their first line is a large part of them."""


def job(*, steps: int, generators: int) -> dict[str, Any]:
    """Simulated parts, as fast as possible."""
    made = simulated_job(
        "soak",
        pipeline={"batchGroups": BATCH_GROUPS, "steps": steps},
        engine={"slots": 64, "timeScale": 0.0, "meanTokens": 24.0},
        trainer={"engine": {"simulated": {"secondsPerStep": 0.0}}},
        storage={"checkpoints": {"intervalSteps": 20}},
        failurePolicy={"maxRestarts": 1000},
    )
    made["spec"]["generators"][0]["scaling"] = {"static": {"replicas": generators}}
    made["spec"]["task"] |= {"sampling": {"maxTokens": 256}, "evaluation": {"maxPrompts": 16, "intervalSteps": 100}}
    return made


@dataclass(slots=True)
class Readings:
    """What was read, twice a second."""

    run_dir: Path
    runner: psutil.Process
    steps: list[int] = field(default_factory=list)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Process -> (reading, resident bytes)."""
    journal_bytes: list[tuple[int, int]] = field(default_factory=list)
    metrics_bytes: int = 0

    def read(self) -> None:
        """One reading."""
        number = len(self.steps)
        self.steps.append(steps_done(self.run_dir))
        for name, process in [("runner", self.runner), *workers(self.run_dir)]:
            try:
                self.memory.setdefault(name, []).append((number, process.memory_info().rss))
            except psutil.NoSuchProcess:
                continue
        journal = self.run_dir / keys.FILE_JOURNAL
        self.journal_bytes.append((number, size(journal) + size(journal.with_name(journal.name + "-wal"))))
        self.metrics_bytes = sum(size(path) for path in (self.run_dir / keys.DIR_METRICS).glob("*"))


def workers(run_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Name and process of every worker that is alive."""
    for path in sorted((run_dir / keys.DIR_ENDPOINTS).glob("*.json")):
        try:
            yield path.stem, psutil.Process(int(json.loads(path.read_text())["pid"]))
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            continue


def size(path: Path) -> int:
    """Bytes; 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def steps_done(run_dir: Path) -> int:
    """From the last line of the metrics."""
    try:
        with (run_dir / keys.DIR_METRICS / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            return int(json.loads(file.read().splitlines()[-1])["step"]) + 1
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def run(folder: Path, *, steps: int, generators: int, kills: int) -> tuple[int, Readings]:
    """Run to the end; exit code and readings."""
    (folder / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "question {n}", "answer": "question {n}"}}\n' for n in range(PROMPTS))
    )
    (folder / "job.yaml").write_text(json.dumps(job(steps=steps, generators=generators)))
    run_dir = folder / "run"
    command = [sys.executable, "-m", "streamrl_cli.main", "run", "--plain", "job.yaml", "--run-dir", str(run_dir)]
    with (folder / "run.out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    readings = Readings(run_dir, psutil.Process(process.pid))
    victims = [kind for _ in range(kills) for kind in ("generator", "trainer", "scheduler")][:kills]
    while process.poll() is None:
        if steps_done(run_dir) < steps:  # afterwards the runner writes the report of the whole run, once
            readings.read()
        if victims and readings.steps[-1] >= steps * (kills - len(victims) + 1) // (2 * kills + 1):  # in the first half
            kill(run_dir, victims.pop(0))
        time.sleep(READ_S)
    return process.returncode, readings


def kill(run_dir: Path, kind: str) -> None:
    """`kill -9` of one worker."""
    for name, process in workers(run_dir):
        if name.startswith(kind):
            process.send_signal(signal.SIGKILL)
            return


def by_tenths(values: list[tuple[int, int]], *, readings: int) -> list[int]:
    """Largest value in each tenth of the run; 0 in one without a reading."""
    tenths: list[list[int]] = [[] for _ in range(TENTHS)]
    for number, value in values:
        tenths[number * TENTHS // readings].append(value)
    return [max(tenth, default=0) for tenth in tenths]


def judge_flat(name: str, values: list[tuple[int, int]], *, readings: int) -> bool:
    """Print the tenths; whether the last half is level."""
    tenths = by_tenths(values, readings=readings)
    flat = 0 < max(tenths[MIDDLE:]) <= FLAT * tenths[MIDDLE]
    print(f"  {name:18} {' '.join(f'{value / 1e6:6.1f}' for value in tenths)} MB  {'flat' if flat else 'GROWS'}")
    return flat


def judge_bubbles(run_dir: Path) -> bool:
    """Parts against wall, wall against clock, for every line of every life of every process."""
    exact = True
    for path in sorted((run_dir / keys.DIR_METRICS).glob("*-[0-9].jsonl")):
        lives: dict[str, list[dict[str, Any]]] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            lives.setdefault(line["instance"], []).append(line)
        worst = max(off(sum(line["parts"].values()), line["wall_s"]) for life in lives.values() for line in life)
        drift = max((clock_drift(life) for life in lives.values()), default=0.0)
        good = worst <= EXACT and drift <= EXACT
        exact &= good
        print(
            f"  {path.stem:18} parts off by {worst:.2e}, wall against clock {drift:.2e}  {'exact' if good else 'OFF'}"
        )
    return exact


def off(total: float, wall_s: float) -> float:
    """Relative difference."""
    return abs(total - wall_s) / max(wall_s, 1e-3)


def clock_drift(life: list[dict[str, Any]]) -> float:
    """How far the counted wall is from the clock, over one life; a clock that jumps shows as well."""
    elapsed_s = life[-1]["t"] - life[0]["t"]
    assert all(one["wall_s"] <= other["wall_s"] for one, other in pairwise(life)), "a wall went back"
    return off(life[-1]["wall_s"] - life[0]["wall_s"], elapsed_s) if elapsed_s >= MIN_WALL_S else 0.0


def judge(readings: Readings, *, exit_code: int, steps: int) -> bool:
    """Print everything; whether all is as it must be."""
    count, run_dir = len(readings.steps), readings.run_dir
    samples = steps * BATCH_GROUPS * GROUP_SIZE
    print(f"{steps} steps, {samples} samples in {count * READ_S:.0f} s and more; exit code {exit_code}")
    good = exit_code == 0
    print("resident memory by tenths of the run:")
    for name, values in readings.memory.items():
        good &= judge_flat(name, values, readings=count)
    print("journal and write-ahead log by tenths:")
    good &= judge_flat("journal", readings.journal_bytes, readings=count)
    print(f"metrics: {readings.metrics_bytes / 1e6:.1f} MB, {readings.metrics_bytes / max(1, steps):.0f} bytes a step")
    print("bubbles:")
    good &= judge_bubbles(run_dir)
    check = subprocess.run(
        [sys.executable, "-m", "streamrl_cli.main", "journal", "check", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    print("journal check:", *check.stdout.splitlines(), sep="\n  ")
    return good and check.returncode == 0


def main() -> int:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_000, help="of 256 samples")
    parser.add_argument("--generators", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6, help="in the first half of the run")
    parser.add_argument("--keep", type=Path, help="leave everything in this new folder")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="streamrl-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        exit_code, readings = run(folder, steps=args.steps, generators=args.generators, kills=args.kills)
        good = judge(readings, exit_code=exit_code, steps=args.steps)
        if exit_code:
            print((folder / "run.out").read_text()[-2000:])
        return 0 if good else 1
    finally:
        if args.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
