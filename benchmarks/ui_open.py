"""How long the pages of a long run take to open in Chromium: 10,000 steps, a million samples in the archive.

Makes the folder by the scheduler's own journal and archive (minutes), or takes the one of `--folder` that it made before. A page is open
once its first chart is drawn, or its first sample or row is there. For each page: the first visit after the server's start, the median of
two more, and the CPU
seconds of server and browser for a first visit, which do not depend on what else runs on the machine.

Usage: ui_open.py [--steps N] [--folder DIR]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.async_api import Page, async_playwright

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl.spec.storage import Archive
from streamrl_cli.runner.folder import create_folder
from streamrl_cli.ui.catalog import Catalog
from streamrl_cli.ui.pages import application
from streamrl_pages.server import PageServer
from streamrl_pages.website import TIMEOUT_S
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.stream.packing import pack_float32, pack_int32

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.chromium import CHROMIUM, FLAGS
from support.histories import attempt, plan
from support.hostile import step_line
from support.jobs import simulated_job
from support.journals import OpenJournal

GROUPS, SAMPLES, TOKENS = 10, 10, 24
"""Of a step, of a group, of a sample."""
METRICS = 35
"""Of the trainer, on a line of a step: the line has 1.5 kB then, as a real one."""
CHECKPOINT_EVERY = 50
STEP_S = 2
PROCESSES = ("trainer-0", "generator-sim-0", "generator-sim-1", "generator-sim-2")
TOKEN = "the token of the benchmark"  # noqa: S105 - of a server that lives for the measurement
PAGES = {
    "runs": ("/", "#f0 .main-svg"),
    "overview": ("{run}", "#f0 .main-svg"),
    "timeline": ("{run}/timeline", "#f0 .main-svg"),
    "samples, newest": ("{run}/samples", ".sample"),
    "samples, a text of step 0": ("{run}/samples?text=answer+0+of+7&step=0", "main p"),
    "events": ("{run}/events", "td"),
}
VISITS = 2


async def make(folder: Path, *, steps: int) -> None:
    """A run folder as a run leaves it."""
    create_folder(
        parse_job(simulated_job(steps=steps, batch_groups=GROUPS)),
        base_dir=folder.parent,
        parent=folder.parent,
        path=folder,
    )
    chance = random.Random(0)
    write_metrics(folder / "metrics", steps=steps, chance=chance)
    journal = OpenJournal(folder / "journal.sqlite", archiver=Archiver(folder, spec=Archive(maxBytes="8Gi")))
    await journal.write([attempt(1, 0)])
    for step in range(steps):
        ids = tuple(range(step * GROUPS, (step + 1) * GROUPS))
        advantages = pack_float32([chance.gauss(0, 1) for _ in range(GROUPS * SAMPLES)])
        taken = rec.StepTaken(attempt=1, step=step, group_ids=ids, advantages=advantages)
        await journal.write(
            [*plan(ids[0], GROUPS), *(scored(group_id, step=step, chance=chance) for group_id in ids), taken]
        )
        if (step + 1) % CHECKPOINT_EVERY == 0:
            await journal.write([rec.Checkpointed(step=step, path=f"step-{step:08d}")])
    journal.journal.close()


def scored(group_id: int, *, step: int, chance: random.Random) -> rec.Scored:
    """A group with texts."""
    samples = tuple(
        pb.Sample(
            group_id=group_id,
            sample_index=index,
            prompt_tokens=pack_int32([1] * 12),
            tokens=pack_int32(chance.choices(range(30_000), k=TOKENS)),
            logprobs=pack_float32([-chance.expovariate(1) for _ in range(TOKENS)]),
            spans=[pb.VersionSpan(tokens=TOKENS, step=step, attempt=1)],
            finish_reason="stop",
            reward=chance.random(),
            generator_id="generator-sim-0",
            generate_s=0.5,
        ).SerializeToString()
        for index in range(SAMPLES)
    )
    written = [pb.SampleTexts(turns=[f"answer {index} of {group_id}"]) for index in range(SAMPLES)]
    texts = pb.GroupTexts(prompt=f"prompt {group_id}", samples=written).SerializeToString()
    return rec.Scored(
        group_id=group_id, start_version=step, trajectories=samples, size_bytes=sum(map(len, samples)), texts=texts
    )


def write_metrics(folder: Path, *, steps: int, chance: random.Random) -> None:
    """Steps, and a line a second of each process."""
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(steps):
            numbers = {"reward_mean": chance.random(), "elapsed_s": float(STEP_S * step), "time_s": 1e9 + STEP_S * step}
            trainer = {f"metric_{number}": chance.random() for number in range(METRICS)}
            file.write(json.dumps(step_line(step, "answer") | numbers | {"trainer": trainer}) + "\n")
    for process in PROCESSES:
        with (folder / f"{process}.jsonl").open("w") as file:
            busy_s = 0.0
            for at in range(1, STEP_S * steps):
                busy_s += chance.random()
                parts = {"busy": busy_s, "pipeline_no_samples": at - busy_s}
                file.write(json.dumps({"t": 1e9 + at, "instance": "a", "wall_s": float(at), "parts": parts}) + "\n")


async def measure(folder: Path) -> None:
    """Print a line for each page."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, (path, sign) in PAGES.items():
            server = PageServer(application(folder, token=TOKEN, names=frozenset()), timeout_s=TIMEOUT_S)
            base = f"http://127.0.0.1:{await server.start(host='127.0.0.1', port=0)}"
            context = await browser.new_context(extra_http_headers={"authorization": f"Bearer {TOKEN}"})
            page = await context.new_page()
            await page.goto(f"{base}/compare")  # the browser is warm, and nothing has been read
            key = next(iter(Catalog(folder).paths()))
            address = base + path.format(run=f"/runs/{key}")
            before_s = spent_s()
            took_s = [await opened(page, address, sign)]
            cpu_s = spent_s() - before_s
            took_s += [await opened(page, address, sign) for _ in range(VISITS)]
            print(f"{name:26} first {took_s[0]:.2f} s, then {statistics.median(took_s[1:]):.2f} s, CPU {cpu_s:.2f} s")
            await context.close()
            await server.close()
        await browser.close()


def spent_s() -> float:
    """CPU seconds of the server, which is this process, and of the browser."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def opened(page: Page, address: str, sign: str) -> float:
    """Seconds until the page shows its first chart, sample or row."""
    await page.goto("about:blank")
    begun_s = time.perf_counter()
    await page.goto(address, wait_until="commit")
    await page.locator(sign).first.wait_for(timeout=120_000)
    return time.perf_counter() - begun_s


async def main(argv: list[str] | None = None) -> None:
    """Make and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--make", action="store_true", help="only make the folder")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as room:
        folder = args.folder or Path(room) / "run"
        if not folder.exists():
            await make(folder, steps=args.steps)
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{args.steps * GROUPS * SAMPLES:,} samples, {size_bytes >> 20} MiB, load {os.getloadavg()[0]:.0f}")
        await measure(folder)


if __name__ == "__main__":
    asyncio.run(main())
