"""StreamRL beside TRL's GRPOTrainer: samples a second, tokens a second, time to the same reward, processor time by process.

    python benchmarks/peers/compare.py [--tasks short skewed] [--repeats 2] [--ranks 2 --threads 1 ...]

Same model folder, prompts in the same number, reward function, group size, groups a step, token limit, learning rate,
clip and optimiser. The sides take turns (A B A B), one after the other, each on the whole machine. Rates are over the
steady part: from the end of step `_SKIPPED_STEPS` to the end of the last one. TRL's settings below are the fastest
that were found for it here (`--ranks`, `--threads`, `--micro-batch`, `--continuous` try others).
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from materials import HERE, short_materials, skewed_materials, trl_python
from run_folders import read_lines, start

_SKIPPED_STEPS = 3
"""Steps that belong to the start: first allocations, the filling of the pipeline."""
_WINDOW_STEPS = 5
"""A side has reached a reward when the mean of so many steps has."""
_LOOK_S = 0.2
"""Interval of looks at the processor time of processes, in seconds: what a process uses after its last look is not seen."""
_TRL_MICRO_BATCH = {"short": 128, "skewed": 32}
"""Samples of one of TRL's passes; it pads all to the longest of the step."""
_CONTINUOUS = {"page_size": 32, "num_blocks": 1024, "max_batch_tokens": 512, "max_requests_per_batch": 256}
"""Sizes of transformers' continuous batching, which its defaults take from the free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimiser step of either side."""

    elapsed_s: float  # since the process was started
    samples: int
    tokens: int
    reward: float  # mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one side."""

    steps: list[Step]
    cpu_s: float
    process_cpu_s: Mapping[str, float]  # by name; as last seen before each ended

    def samples_per_s(self) -> float:
        """Over the steady part."""
        return self._rate([step.samples for step in self.steps])

    def tokens_per_s(self) -> float:
        """Over the steady part; completion tokens with their end tokens."""
        return self._rate([step.tokens for step in self.steps])

    def seconds_to(self, reward: float) -> float | None:
        """From the start of the process to the end of the first window of steps with this mean reward; None: never."""
        for last in range(_WINDOW_STEPS - 1, len(self.steps)):
            window = self.steps[last - _WINDOW_STEPS + 1 : last + 1]
            if statistics.mean(step.reward for step in window) >= reward:
                return self.steps[last].elapsed_s
        return None

    def start_s(self) -> float:
        """Until the end of the first step."""
        return self.steps[0].elapsed_s

    def _rate(self, counts: Sequence[int]) -> float:
        took_s = self.steps[-1].elapsed_s - self.steps[_SKIPPED_STEPS - 1].elapsed_s
        return sum(counts[_SKIPPED_STEPS:]) / took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job and what both sides start from."""

    name: str
    job: Path
    model: Path
    prompts: Path
    spec: Any  # RLJobSpec


def main() -> None:
    """Run the sides in turn and print a table for each task."""
    args = _arguments()
    for name in args.tasks:
        steps = {"streamrl": args.steps or {"short": 40, "skewed": 16}[name]}
        steps["trl"] = args.trl_steps or steps["streamrl"]
        task = _task(name, steps=max(steps.values()))
        sides: dict[str, Callable[[Path], Result]] = {
            "streamrl": lambda folder, task=task, steps=steps: run_streamrl(task, folder, steps=steps["streamrl"], overrides=args.set),
            "trl": lambda folder, task=task, steps=steps: run_trl(task, folder, steps=steps["trl"], args=args),
        }  # fmt: skip
        results: dict[str, list[Result]] = {side: [] for side in args.sides}
        for turn in range(args.repeats):
            for side in args.sides:
                with tempfile.TemporaryDirectory() as scratch:
                    result = sides[side](Path(scratch))
                results[side].append(result)
                print(f"# {name}, turn {turn + 1}, {side}: {result.samples_per_s():.0f} samples/s, {result.tokens_per_s():.0f} tokens/s, rewards {result.steps[0].reward:.3f} to {result.steps[-1].reward:.3f}", flush=True)  # fmt: skip
        _print_table(name, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=["short", "skewed"], default=["short", "skewed"])
    parser.add_argument("--sides", nargs="+", choices=["streamrl", "trl"], default=["streamrl", "trl"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of StreamRL")
    parser.add_argument("--trl-steps", type=int)
    parser.add_argument("--ranks", type=int, default=2, help="TRL's processes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each of them")
    parser.add_argument("--micro-batch", type=int, help="samples of one of TRL's passes")
    parser.add_argument("--continuous", action="store_true", help="TRL with transformers' continuous batching")
    parser.add_argument("--set", action="append", default=[], help="change a field of StreamRL's job")
    return parser.parse_args()


def _task(name: str, *, steps: int) -> Task:
    from streamrl_cli.jobfile import load_job

    job = HERE / f"{name}.yaml"
    spec = load_job(job, local=False).spec  # `run_streamrl` names the files of the skewed task
    if name == "short":
        model, prompts = short_materials(job, prompts=steps * spec.pipeline.batch_groups)
    else:
        model, prompts = skewed_materials()
    return Task(name=name, job=job, model=model, prompts=prompts, spec=spec)


def run_streamrl(task: Task, folder: Path, *, steps: int, overrides: Sequence[str]) -> Result:
    """`streamrl run` of the task's job; each process has one core."""
    changes = [f"spec.pipeline.steps={steps}", *overrides]
    if task.name == "skewed":
        changes += [f"spec.model.path.directory={task.model}", f"spec.task.dataset.jsonl.path={task.prompts}"]
    run_dir = folder / "run"
    began_s, cpu_s = time.time(), _children_cpu_s()
    cache = {"XDG_CACHE_HOME": str(folder)} if task.name == "short" else {}
    if cache:  # the model that the other side gets, under the name that the job looks for
        (folder / "streamrl").mkdir()
        (folder / "streamrl" / "models").symlink_to(task.model.parent)
    with cpu_by_process() as processes:
        start(task.job, folder=run_dir, changes=changes, **cache)
    lines = read_lines(run_dir / "metrics" / "steps.jsonl")
    steps_done = [
        Step(
            elapsed_s=line["time_s"] - began_s,
            samples=line["samples"],
            tokens=line["tokens"],
            reward=line["reward_mean"],
        )
        for line in lines
    ]
    return Result(steps=steps_done, cpu_s=_children_cpu_s() - cpu_s, process_cpu_s=processes)


def run_trl(task: Task, folder: Path, *, steps: int, args: argparse.Namespace) -> Result:
    """TRL's trainer on the task, in its own environment."""
    spec, python = task.spec, trl_python()
    settings = {
        "task": task.name,
        "model": str(task.model),
        "prompts": str(task.prompts),
        "output": str(folder / "trl"),
        "group_size": spec.task.group_size,
        "batch_groups": spec.pipeline.batch_groups,
        "max_tokens": spec.task.sampling.max_tokens,
        "steps": steps,
        "learning_rate": spec.trainer.learning_rate,
        "warm_up_steps": spec.trainer.warm_up_steps,
        "seed": spec.seed,
        "threads": args.threads,
        "micro_batch": args.micro_batch or _TRL_MICRO_BATCH[task.name],
        "continuous": _CONTINUOUS if args.continuous else None,
        "record": str(folder / "trl.step") if getattr(args, "record", False) else None,
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    script = [str(HERE / "trl_grpo.py"), str(file)]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [str(python), *(ranks if args.ranks > 1 else []), *script]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": str(args.threads)}
    log = folder / "trl.log"
    cpu_s = _children_cpu_s()
    with log.open("wb") as out, cpu_by_process() as processes:
        done = subprocess.run(command, check=False, stdout=out, stderr=out, env={**os.environ, **quiet})
    if done.returncode:
        sys.exit(f"TRL failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
    ranks_lines = [read_lines(folder / f"trl.{rank}.jsonl") for rank in range(args.ranks)]
    steps_done = [_merged(lines) for lines in zip(*ranks_lines, strict=True)]
    return Result(steps=steps_done, cpu_s=_children_cpu_s() - cpu_s, process_cpu_s=processes)


def _merged(lines: Sequence[dict[str, Any]]) -> Step:
    """One step of all ranks."""
    samples = sum(line["samples"] for line in lines)
    return Step(
        elapsed_s=max(line["elapsed_s"] for line in lines),
        samples=samples,
        tokens=sum(line["tokens"] for line in lines),
        reward=sum(line["reward_sum"] for line in lines) / samples,
    )


def _print_table(name: str, results: dict[str, list[Result]]) -> None:
    goal = _common_reward(results)
    print(f"\n{name}: reward {goal:.3f} is the highest that every run reached (mean of {_WINDOW_STEPS} steps)")
    print("| side | samples/s | tokens/s | first step | seconds to the reward | CPU s a 1,000 samples |")
    print("|---|---|---|---|---|---|")
    for side, runs in results.items():
        cpu = [1000 * run.cpu_s / sum(step.samples for step in run.steps) for run in runs]
        columns = [
            _spread([run.samples_per_s() for run in runs]),
            _spread([run.tokens_per_s() for run in runs]),
            _spread([run.start_s() for run in runs]),
            _spread([run.seconds_to(goal) or float("nan") for run in runs]),
            f"{statistics.median(cpu):.1f}",
        ]
        print(f"| {side} | {' | '.join(columns)} |")
    print("\n| side | process | CPU s a 1,000 samples |\n|---|---|---|")
    for side, runs in results.items():
        for process in sorted({process for run in runs for process in run.process_cpu_s}):
            used = [1000 * run.process_cpu_s.get(process, 0) / sum(step.samples for step in run.steps) for run in runs]
            print(f"| {side} | {process} | {_spread(used, digits=2)} |")
    if {"streamrl", "trl"} <= results.keys():
        for title, rate in (("samples/s", Result.samples_per_s), ("tokens/s", Result.tokens_per_s)):
            ours, theirs = (statistics.median(map(rate, results[side])) for side in ("streamrl", "trl"))
            print(f"ratio of {title}: {ours / theirs:.2f}")
    print(flush=True)


def _common_reward(results: dict[str, list[Result]]) -> float:
    """The best window of the run whose best window is the worst."""
    runs = [run for side in results.values() for run in side]
    return min(
        max(
            statistics.mean(step.reward for step in run.steps[at : at + _WINDOW_STEPS])
            for at in range(max(1, len(run.steps) - _WINDOW_STEPS + 1))
        )
        for run in runs
    )


def _spread(values: Sequence[float], *, digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


@contextlib.contextmanager
def cpu_by_process() -> Iterator[Mapping[str, float]]:
    """Sum the processor time of this process's descendants by their names while the context lasts, as last seen before they ended."""
    seen: dict[int, tuple[str, float]] = {}
    totals: Counter[str] = Counter()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            for pid, (name, cpu_s) in _descendants().items():
                before, _ = seen.get(pid, ("", 0.0))
                seen[pid] = name or before, cpu_s  # one that has ended, and was not waited for, has no command line

    thread = threading.Thread(target=watch, name="cpu-by-process")
    thread.start()
    try:
        yield totals
    finally:
        over.set()
        thread.join()
        for name, cpu_s in seen.values():
            totals[name] += cpu_s


def _descendants() -> dict[int, tuple[str, float]]:
    """Return name and processor time of each process that this one or a descendant has started."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = process.cpu_times()
            found[process.pid] = _process_name(_command(process)), times.user + times.system
    return found


def _command(process: psutil.Process) -> list[str]:
    """Return the command line; empty of one that has ended, and was not waited for."""
    try:
        return process.cmdline()
    except psutil.ZombieProcess:
        return []


def _process_name(command: Sequence[str]) -> str:
    """Return the module, else the program, that a command line runs; "" of an empty one."""
    if not command:
        return ""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else Path(command[0]).name
    return module.removeprefix("streamrl_workers.")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
