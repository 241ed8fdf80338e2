"""How long do trainer and generators stand still for a version of the weights? Real jobs by `streamrl run`, over links of some speeds.

```
    ranks of the trainer ──127.0.0.1, as fast as it is── one another        (gloo)
    weights, scheduler   ──127.0.0.2, a token bucket──▶  generators         (tc-tbf, in a network namespace of this script)
```
`python benchmarks/weights_stall.py [--megabytes 100] [--ranks 1,2,4] [--gigabits 0,1,10] [--steps 6] [--against CHECKOUT]`. Needs root (a network
namespace) and iproute2. A link of 0 is the loopback alone. `--against` runs each job with that checkout's `.venv` too, in turns with this
one's, and prints the ratio of both in one run; both read only `metrics/*.jsonl`, which all releases write.

The model has random weights in float32, and steps are tiny, so that a version is what takes time. Printed for each version, without those
of the first steps: seconds in which rank 0 and a generator did nothing but wait for weights or take them (part `weights` of their wall),
the time of a step, bytes over the link, bytes between the ranks in a step. The last are those of FSDP2's passes too: two checkouts that
train alike differ by what publishing gathers.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = "127.0.0.2"
"""Address at which servers listen; the ranks meet at 127.0.0.1."""
SKIPPED_STEPS = 2
"""At the beginning: the first version goes to generators that have none, and both sides warm up."""
BURST = "1mb"
"""Of the token bucket: several packets of the loopback, which have up to 64 KiB."""
UNBOUND = "100gbit"
RUN_S = 1800.0
POLL_S = 0.05
HIDDEN, FEED_FORWARD = 512, 2048
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of each version, or each step."""

    trainer_s: float
    generator_s: float
    step_s: float
    link_bytes: float
    rank_bytes: float


HEAD = ("stall of the trainer, s", "stall of a generator, s", "a step, s", "MB over the link", "MB between ranks")


def job(*, megabytes: float, ranks: int, steps: int, generators: int) -> dict[str, Any]:
    """A job whose model has about so many bytes in float32."""
    layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))
    model = {"hiddenSize": HIDDEN, "layers": layers, "heads": 8, "intermediateSize": FEED_FORWARD, "maxPositions": 256}
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "stall"},
        "spec": {
            "model": {"scratch": model | {"warmUp": {"steps": 0}}},
            "task": {
                "dataset": {"reasoningGym": {"name": "chain_sum"}},
                "groupSize": 2,
                "sampling": {"maxTokens": 8},
                "rewards": [{"name": "answer", "verifier": {}}],
                "evaluation": {"maxPrompts": 1, "intervalSteps": steps},
            },
            "algorithm": {"grpo": {}},
            "pipeline": {"mode": "StreamAsync", "batchGroups": 2, "steps": steps},
            "generators": [
                {"name": "g", "engine": {"hf": {"slots": 4}}, "scaling": {"static": {"replicas": generators}}}
            ],
            "trainer": {"processesPerNode": ranks, "microBatchTokens": 256},
            "storage": {"checkpoints": {"intervalSteps": steps, "keepLast": 1}},
        },
    }


def shape(gigabits: float) -> None:
    """Give the loopback of this namespace a link for what the servers send; 0: as fast as the rest."""
    if "htb" in _tc("qdisc", "show", "dev", "lo"):
        _tc("qdisc", "del", "dev", "lo", "root")
    _tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1")
    for band in ("1:1", "1:3"):  # one class for each kind of traffic: both count their bytes
        _tc("class", "add", "dev", "lo", "parent", "1:", "classid", band, "htb", "rate", UNBOUND, "quantum", "200000")
    _tc(
        *("filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", "u32"),
        *("match", "ip", "src", f"{LINK}/32", "flowid", "1:3"),
    )
    if gigabits:
        rate = f"{round(gigabits * 1000)}mbit"
        _tc("qdisc", "add", "dev", "lo", "parent", "1:3", "tbf", "rate", rate, "burst", BURST, "latency", "200ms")


def _tc(*arguments: str) -> str:
    return subprocess.run([_tool("tc"), *arguments], check=True, capture_output=True, text=True).stdout


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        raise SystemExit(f"{name} is not there: install iproute2 and util-linux")
    return path


def sent_bytes() -> tuple[int, int]:
    """Bytes that left by the link, and between all others."""
    lines = _tc("-s", "class", "show", "dev", "lo").splitlines()
    found = {
        line.split()[2]: int(counts.split()[1])
        for line, counts in itertools.pairwise(lines)
        if line.startswith("class htb")
    }
    return found["1:3"], found["1:1"]


def measure(checkout: Path, *, document: Mapping[str, Any], gigabits: float, cache: Path) -> Found:
    """Run the job with a checkout's interpreter; what it measured between the first steps and the last."""
    shape(gigabits)
    with tempfile.TemporaryDirectory(prefix="streamrl-stall-") as folder:
        base, run_dir = Path(folder), Path(folder) / "run"
        (base / "job.yaml").write_text(json.dumps(document))
        log = base / "run.out"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [checkout / ".venv/bin/streamrl", "run", "job.yaml", "--run-dir", run_dir],
                cwd=base,
                env=os.environ | {"STREAMRL_BIND_HOST": LINK, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )
            try:
                marks = list(_marks(process, run_dir, upto=document["spec"]["pipeline"]["steps"], log=log))
            finally:
                process.terminate()
                process.wait()
    (begun_s, before), (ended_s, after) = marks
    versions = document["spec"]["pipeline"]["steps"] - SKIPPED_STEPS
    differences = [(then - now) / versions for now, then in zip(before, after, strict=True)]
    return Found(
        trainer_s=differences[0],
        generator_s=differences[1],
        step_s=(ended_s - begun_s) / versions,
        link_bytes=differences[2],
        rank_bytes=differences[3],
    )


def _marks(
    process: subprocess.Popen[bytes], run_dir: Path, *, upto: int, log: Path
) -> Iterator[tuple[float, tuple[float, ...]]]:
    """(when, stalls and bytes until then) once the first steps are recorded, and once the last is."""
    deadline_s = time.monotonic() + RUN_S
    for steps in (SKIPPED_STEPS, upto):
        while len(_lines(run_dir / "metrics/steps.jsonl")) < steps:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run has not come to step {steps}:\n{log.read_text()[-4000:]}")
            time.sleep(POLL_S)
        at_s = float(_lines(run_dir / "metrics/steps.jsonl")[steps - 1]["time_s"])
        generators = sorted((run_dir / "metrics").glob("generator-*.jsonl"))
        stalls = [_stalled_s(path, at_s=at_s) for path in (run_dir / "metrics/trainer-0.jsonl", *generators)]
        yield at_s, (stalls[0], statistics.mean(stalls[1:]), *sent_bytes())


def _stalled_s(path: Path, *, at_s: float) -> float:
    """Seconds of part `weights` until then, between the two lines around that time."""
    while True:
        lines = _lines(path)
        later = next((number for number, line in enumerate(lines) if line["t"] >= at_s), None)
        if later:
            before, after = lines[later - 1], lines[later]
            share = (at_s - before["t"]) / (after["t"] - before["t"])
            first, second = before["parts"]["weights"], after["parts"]["weights"]
            return float(first + share * (second - first))
        time.sleep(POLL_S)  # processes write a line a second


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def compare(args: argparse.Namespace) -> None:
    """Print a row for each link and number of ranks; with `--against` three."""
    sides = {"now": ROOT} if args.against is None else {"before": args.against.resolve(), "now": ROOT}
    print(f"| link | ranks | | {' | '.join(HEAD)} |\n|---|---|---|{'---|' * len(HEAD)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-stall-cache-") as cache:
        for gigabits in args.gigabits:
            for ranks in args.ranks:
                document = job(megabytes=args.megabytes, ranks=int(ranks), steps=args.steps, generators=args.generators)
                found: dict[str, list[Found]] = {name: [] for name in sides}
                for _ in range(args.repeats):
                    for name, checkout in sides.items():
                        found[name].append(measure(checkout, document=document, gigabits=gigabits, cache=Path(cache)))
                _print_rows(found, link=f"{gigabits:g} Gbit/s" if gigabits else "loopback", ranks=int(ranks))


def _print_rows(found: Mapping[str, Sequence[Found]], *, link: str, ranks: int) -> None:
    medians = {name: _medians(runs) for name, runs in found.items()}
    for name, values in medians.items():
        cells = [f"{value:.3f}" for value in values[:3]] + [f"{value / 1e6:.1f}" for value in values[3:]]
        print(f"| {link} | {ranks} | {name} | {' | '.join(cells)} |")
    if len(medians) > 1:
        ratios = [
            f"{now / before:.2f}" if before else "-"
            for before, now in zip(medians["before"], medians["now"], strict=True)
        ]
        print(f"| {link} | {ranks} | now / before | {' | '.join(ratios)} |")
    sys.stdout.flush()


def _medians(runs: Sequence[Found]) -> list[float]:
    return [statistics.median(getattr(run, field.name) for run in runs) for field in fields(Found)]


def numbers(text: str) -> list[float]:
    """Of a list with commas."""
    return [float(one) for one in text.split(",")]


def main() -> None:
    """Measure and print, in a network namespace of its own."""
    parser = argparse.ArgumentParser(description="Stall of trainer and generators for each version of the weights.")
    parser.add_argument("--megabytes", type=float, default=100, help="of a version in float32")
    parser.add_argument("--ranks", type=numbers, default=[1.0, 2.0, 4.0])
    parser.add_argument("--gigabits", type=numbers, default=[0.0, 1.0, 10.0], help="of the link; 0: loopback")
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, with its .venv")
    args = parser.parse_args()
    if os.environ.get("STREAMRL_BENCH_NAMESPACE") != "1":
        inside = [_tool("unshare"), "--net", sys.executable, *sys.argv]
        sys.exit(subprocess.run(inside, env=os.environ | {"STREAMRL_BENCH_NAMESPACE": "1"}, check=False).returncode)
    subprocess.run([_tool("ip"), "link", "set", "lo", "up"], check=True)
    compare(args)


if __name__ == "__main__":
    main()
