"""What it costs a run to be watched: processor seconds of its own processes for each trained sample, with and without, in turns.

    python benchmarks/observability_cost.py [--feature wandb tensorBoard mlflow trackio archive tracing] [--pairs 5] [--steps 60] [--job examples/chain-sum.yaml]

Runs one with the feature and one without, by turns, all with the job's seed. Of each process the processor seconds (with those of its
helpers) are counted from the end of the third step to the end of the run, so neither imports nor the warm-up are in them. Processor time, not time
on the wall: another's work on the machine holds both alike. A tracker's own process is told apart. Prints a table with the mean of the pairs'
differences and its 95 % interval.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from run_folders import EXAMPLE, read_lines

from streamrl_cli.reporting.comparison import mean

_TRACKERS = {"wandb": "{mode: Offline}", "tensorBoard": "{}", "mlflow": "{}", "trackio": "{}"}
FEATURES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    **{tracker: ((f"spec.trackers={{{tracker}: {settings}}}",), ()) for tracker, settings in _TRACKERS.items()},
    "archive": ((), ("spec.storage.archive.sharePercent=0",)),
    "tracing": (("spec.tracing.endpoint={endpoint}", "spec.tracing.sharePercent=10"), ()),
}
"""Feature -> changes of the job with it, and without; `{endpoint}`: of a collector that takes everything."""
_COLLECTOR = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
FIRST_STEP = 3
_LOOK_S = 0.1
_APART = "streamrl_workers.trackers"


def main() -> None:
    """Run the pairs of each feature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feature", nargs="+", choices=list(FEATURES), default=list(_TRACKERS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--job", type=Path, default=EXAMPLE)
    args = parser.parse_args()
    with collector() as endpoint:
        _measure(args, endpoint=endpoint)


def _measure(args: argparse.Namespace, *, endpoint: str) -> None:
    for feature in args.feature:
        pairs: list[tuple[Counter[str], Counter[str]]] = []
        for number in range(args.pairs):
            fixed = [f"spec.pipeline.steps={args.steps}"]
            order = (0, 1) if number % 2 else (1, 0)  # who comes first finds the caches as the other left them
            found = {
                which: cost_of(
                    args.job,
                    changes=[*fixed, *(change.replace("{endpoint}", endpoint) for change in FEATURES[feature][which])],
                )
                for which in order
            }
            pairs.append((found[0], found[1]))
            print(f"# {feature}, pair {number}: {dict(found[0])} with, {dict(found[1])} without", flush=True)
        print(table(feature, pairs))


@contextmanager
def collector() -> Iterator[str]:
    """The endpoint of a server that takes everything."""
    process = subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
    finally:
        process.kill()
        process.wait()


def cost_of(job: Path, *, changes: Sequence[str]) -> Counter[str]:
    """Process -> processor milliseconds for each trained sample."""
    flags = [part for change in changes for part in ("--set", change)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "streamrl_cli.main", "run", str(job), "--plain", "--run-dir", str(folder)]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
        begin, last = Counter[int](), Counter[int]()
        names: dict[int, str] = {}
        while process.poll() is None:
            seen = seconds_of(psutil.Process(process.pid), names=names)
            last.update({pid: used - last[pid] for pid, used in seen.items()})
            if not begin and len(lines_of(folder)) >= FIRST_STEP:
                begin = last.copy()
            time.sleep(_LOOK_S)
        if process.returncode:
            raise SystemExit(process.returncode)
        samples = sum(int(line["samples"]) for line in read_lines(folder / "metrics/steps.jsonl")[FIRST_STEP:])
    used: Counter[str] = Counter()
    for pid, seconds in last.items():
        used[names[pid]] += 1000 * (seconds - begin[pid]) / samples
    return used


def lines_of(folder: Path) -> list[str]:
    """Lines of steps so far."""
    file = folder / "metrics" / "steps.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def seconds_of(process: psutil.Process, *, names: dict[int, str]) -> dict[int, float]:
    """Process number -> processor seconds, of the run's processes and all below them; who has ended is left out."""
    found = {}
    for one in process.children(recursive=True):
        try:
            names.setdefault(one.pid, name_of(one, known=names))
            times = one.cpu_times()
            found[one.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


def name_of(process: psutil.Process, *, known: dict[int, str]) -> str:
    """Its module's, or that of who started it: a helper belongs to its process, but a tracker is apart."""
    command = process.cmdline()
    if _APART in command:
        return "trackers"
    parent = known.get(process.ppid())
    if parent is not None:
        return parent
    return next((part.rpartition(".")[2] for part in command if part.startswith("streamrl_workers.")), "other")


def table(feature: str, pairs: Sequence[tuple[Counter[str], Counter[str]]]) -> str:
    """One line a process, and one for all but the tracker."""
    names = sorted({name for pair in pairs for one in pair for name in one} - {"trackers"})
    rows = ["| process | without, ms a sample | with | difference |", "|---|---|---|---|"]
    for name in [*names, "all of these"]:
        values = [[sum(one[key] for key in (names if name not in names else [name])) for one in pair] for pair in pairs]
        rows.append(f"| {name} | {_line(values)} |")
    apart = statistics.mean(pair[0]["trackers"] for pair in pairs)
    return "\n".join((f"{feature}:", *rows, f"| a tracker's own process | | {apart:.3f} | |"))


def _line(values: Sequence[Sequence[float]]) -> str:
    """Means, and the mean of the differences in percent with its interval."""
    before = statistics.fmean(without for _, without in values)
    found = mean([100 * (with_it - without) / before if before else 0.0 for with_it, without in values])
    assert found is not None, "there is a pair"
    interval = "" if found.half_width is None else f" ± {found.half_width:.2f}"
    return f"{before:.3f} | {statistics.fmean(one for one, _ in values):.3f} | {found.value:+.2f} %{interval}"


if __name__ == "__main__":
    main()
