"""What each version of the weights costs where adapters are trained, and where all weights are: two real runs.

    python benchmarks/adapter_updates.py [--hidden 512] [--layers 8] [--rank 16] [--steps 6]

`examples/chain-sum.yaml` with a model of the given size and few, small steps, as `streamrl run` runs it. While it runs, its
generator is asked how many bytes of weights have arrived. A version's bytes: what came between its load and that of the one before.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from run_folders import EXAMPLE, start

REWARD = {"name": "small", "regex": {"pattern": "^[0-4]"}}
"""What an untrained model earns now and then: without differences of rewards no adapter moves, and none is fetched."""
_POLL_S = 0.1
_PROCESS = "generator-local-0"


def main() -> None:
    """Run both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 512), ("layers", 8), ("rank", 16), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    changes = [
        f"spec.model.scratch={json.dumps(scratch_model(args))}",
        "spec.task.groupSize=8",
        f"spec.task.rewards={json.dumps([REWARD])}",
        "spec.task.evaluation.maxPrompts=8",
        "spec.pipeline.batchGroups=4",
        f"spec.pipeline.steps={args.steps}",
    ]
    whole = version_bytes(changes)
    adapted = version_bytes([*changes, f"spec.trainer.lora.rank={args.rank}"])
    print("| trained | first version | each later version, median | ratio |\n|---|---|---|---|")
    for name, sizes in (("all weights", whole), (f"adapters of rank {args.rank}", adapted)):
        later = statistics.median(sizes[1:])
        print(f"| {name} | {sizes[0] / 1e6:.2f} MB | {later / 1e6:.2f} MB | {later / whole[0]:.4f} |")


def scratch_model(args: argparse.Namespace) -> dict[str, object]:
    """Three times as wide inside; hardly warmed up."""
    return {
        "hiddenSize": args.hidden,
        "layers": args.layers,
        "heads": 8,
        "intermediateSize": 3 * args.hidden,
        "maxPositions": 64,
        "warmUp": {"steps": 1, "batchSize": 4},
    }


def version_bytes(changes: Sequence[str]) -> list[int]:
    """Bytes that each version brought to the generator of a run, as far as it was seen between two versions."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run = threading.Thread(target=start, args=(EXAMPLE,), kwargs={"folder": folder, "changes": changes})
        run.start()
        arrived: dict[int, int] = {}  # by version, when it was seen in the engine first
        while run.is_alive():
            seen = status(folder)
            if seen is not None and seen.get("version") is not None:
                arrived.setdefault(seen["version"]["step"], seen["weights_bytes"])
            time.sleep(_POLL_S)
        run.join()
    totals = [0, *(size for _, size in sorted(arrived.items()))]
    return [after - before for before, after in itertools.pairwise(totals)]


def status(folder: Path) -> dict[str, object] | None:
    """The generator's page; None before it is there and behind its end."""
    try:
        endpoint = json.loads((folder / "endpoints" / f"{_PROCESS}.json").read_text())
        with urllib.request.urlopen(f"http://{endpoint['signals']}/status", timeout=10) as page:
            return dict(json.load(page))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
