"""The scheduler's core without a server, driven by hand at any number of generators and groups; a part of benchmarks/scheduler.py."""

import gc
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import scheduler_parts as parts

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import PARTS
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import main as scheduler_main
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.server.connections import Connections, GeneratorEntry, PeerLink
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.tasks.values import NeedPrompts, Prompt, Score, ScoreSample

PORTION = 64
"""Prompts, scores or other events that reach the core at once."""
BEAT = pb.Heartbeat(active=parts.SLOTS, wall_seconds=100.0, tokens=1_000_000, bubble_seconds=dict.fromkeys(PARTS, 33.3))


class AloneCore:
    """The core without a server: what it asks for is answered here, and what its events take is counted."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.core = Core(settings, rec.Recovered())
        self.leases: defaultdict[str, list[int]] = defaultdict(list)
        self.table: dict[str, dict[str, float]] = {}
        self._asked: deque[Any] = deque()
        self._sequence = self._durable = 0
        self._cpu: list[float] = []

    def call(self, event: Callable[..., Sequence[fx.Effect]], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - any event's
        """An event, and what follows from it until nothing is asked for; scores are left for `scored`."""
        self._one(event, *args, **kwargs)
        self._follow()

    def burst(self, events: Iterable[Callable[[], Sequence[fx.Effect]]]) -> None:
        """Events that have come while others were handled, `PORTION` of them at once."""
        for number, event in enumerate(events, start=1):
            self._one(event)
            if number % PORTION == 0:
                self._follow()
        self._follow()

    def _follow(self) -> None:
        while self.core.has_more or self._durable < self._sequence or self._prompts():
            if self.core.has_more:
                self._one(self.core.resume)
            elif self._durable < self._sequence:
                self._durable = self._sequence
                self._one(self.core.committed, self._sequence)
            else:
                need = self._asked.popleft()
                for first in range(need.first_index, need.first_index + need.count, PORTION):
                    indexes = range(first, min(first + PORTION, need.first_index + need.count))
                    prompts = [Prompt(split="train", index=index, text=f"question {index}") for index in indexes]
                    self._one(self.core.prompts_arrived, prompts)

    def scored(self) -> None:
        """Every second sample is right."""
        asked, self._asked = list(self._asked), deque()
        for first in range(0, len(asked), PORTION):
            self.call(self.core.scores_arrived, [score_of(one) for one in asked[first : first + PORTION]])

    def note(self, part: str, *, count: int) -> None:
        """What was called since the last note is this part, `count` times something."""
        rss = psutil.Process().memory_info().rss
        self.table[part] = {
            "count": count,
            "cpu_s": sum(self._cpu),
            "max_ms": 1e3 * max(self._cpu),
            "rss_mb": rss / 1e6,
        }
        self._cpu.clear()

    def _prompts(self) -> bool:
        return bool(self._asked) and isinstance(self._asked[0], NeedPrompts)

    def _one(self, event: Callable[..., Sequence[fx.Effect]], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        begun_s = time.thread_time()
        effects = event(*args, **kwargs)
        self._cpu.append(time.thread_time() - begun_s)
        for effect in effects:
            if isinstance(effect, fx.Write):
                self._sequence = effect.sequence
            elif isinstance(effect, NeedPrompts | ScoreSample):
                self._asked.append(effect)
            elif isinstance(effect, fx.ToGenerator) and effect.command.HasField("issue"):
                self.leases[effect.generator_id] += [item.lease for item in effect.command.issue.items]


def score_of(asked: ScoreSample) -> Score:
    """Every second sample is right."""
    reward = float(asked.sample_index % 2)
    return Score(group_id=asked.group_id, sample_index=asked.sample_index, reward=reward, parts={})


async def run_core(generators: int, groups: int) -> None:
    """Role `core`: the core alone; the pages over the same generators."""
    gc.set_threshold(*scheduler_main._GC_THRESHOLDS)
    folder = Path(os.environ["STREAMRL_RUN_DIR"])
    job = scheduler_main.read_job(folder / "job.json")
    settings = SchedulerSettings.from_job(job.spec)
    evaluation = replace(settings.evaluation, prompts=0)
    settings = replace(settings, batch_groups=groups // 2, staleness=1, evaluation=evaluation, max_buffer_bytes=1 << 40)
    alone, version = AloneCore(settings), pb.VersionName(attempt=1, step=0)
    core, call = alone.core, alone.call
    hellos = [
        pb.GeneratorHello(generator_id=f"g-{n}", instance="1", pool="p", slots=parts.SLOTS, weights_address=f"g-{n}:1")
        for n in range(generators)
    ]
    call(core.start, 0.0)
    alone.note("groups planned", count=groups)
    call(core.trainer_joined, pb.TrainerHello(trainer_id="t", instance="1", weights_address="-"))
    call(core.published, pb.Published(version=version), address="-")
    alone.burst(partial(core.generator_joined, hello, now_s=0.0) for hello in hellos)
    alone.note("joins", count=generators)
    alone.burst(
        partial(core.weights_loaded, hello.generator_id, version=version, now_s=1.0 + number / generators)
        for number, hello in enumerate(hellos)
    )
    alone.note("weights loaded, slots filled", count=generators)
    for hello in hellos:
        call(core.generator_alive, hello.generator_id, now_s=2.0)
    alone.note("heartbeats", count=generators)
    for hello in hellos:
        ended, alone.leases[hello.generator_id] = alone.leases[hello.generator_id], []
        items = [parts.FakeGenerator.finished(lease, version) for lease in ended]
        call(core.generator_progress, hello.generator_id, items=items, now_s=3.0)
    alone.note("samples ended, next issued", count=generators * parts.SLOTS)
    alone.scored()
    alone.note("samples scored", count=generators * parts.SLOTS)
    call(core.tick, 4.0)
    alone.note("tick", count=1)
    connections = Connections()
    status = StatusEndpoint(core, job=job, connections=connections, run_dir=folder)
    begun_s = time.thread_time()
    for hello in hellos:
        beats, link = BeatWindow(settings.lease_s), PeerLink(hello.generator_id)
        connections.add(GeneratorEntry(link=link, hello=hello, version_step=0, beats=beats, heartbeat=BEAT))
    pages = {"connected": (time.thread_time() - begun_s, b"")}
    for name, page in (("/status", lambda: json.dumps(status.status()).encode()), ("/metrics", status.metrics)):
        begun_s = time.thread_time()
        body = page()
        pages[name] = time.thread_time() - begun_s, body
    for name, (cpu_s, body) in pages.items():
        alone.table[name] = {"count": 1, "cpu_s": cpu_s, "max_ms": 1e3 * cpu_s, "bytes": len(body)}
    call(core.tick, settings.lease_s + 10.0)
    alone.note("all leases revoked", count=generators * parts.SLOTS)
    print(json.dumps(alone.table))
