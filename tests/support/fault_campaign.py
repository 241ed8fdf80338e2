"""Kills and freezes of any process of a `streamrl run`, at moments by a seed, and what must hold at its end.

Victims are all processes that the run has: also fork servers, their workers, rankers, trackers, agents' hosts and programs; the runner; all at once.
A frozen process (SIGSTOP) stays so for longer than the bound of liveness, and goes on if it was not killed by then.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from streamrl.keys import FILE_RESULT
from streamrl_workers.metrics.jsonl import read_jsonl
from support.runs import LocalRun, streamrl, wait_for

Fault = Literal["kill", "freeze"]
MARK = "STREAMRL_TEST_MARK"
"""Environment variable by which processes of a run are found when their parents are gone."""
PATIENCE_S = 900.0
"""For a step, a process or the end on a busy machine."""
FAULTS_UNTIL = 0.8
"""Share of the steps in which faults begin."""
FROZEN_BOUNDS = 1.3
"""Length of a freeze in bounds of liveness."""
ALIVE_AGAIN_S = 60.0
"""For a killed run's processes to see that their parent is gone."""

EXPLAINED = (
    r"has shown no sign of life for|shows signs of life again|no sign of life since",
    r"link broken: (UNAVAILABLE|INTERNAL)",
    r"(comes|gets nothing of version \d+) from [\d.:]+$",
    r"answers end at a limit of tokens",
    r"agent host agents-\d+ is gone; \d+ requests are asked again elsewhere",
    r"was killed by SIG|ended with exit code|asked to be started again|left before the run had ended",
)
"""Warnings that follow from what was done."""
_SAYS = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) |Traceback|Exception ignored|never awaited")


@dataclass
class FaultCampaign:
    """One run, and what is done to it."""

    run: LocalRun
    rng: random.Random
    bound_s: float
    done: Counter[str] = field(default_factory=Counter)
    """Faults by kind and victim."""

    def go(self, faults: list[Fault], *, steps: int) -> None:
        """All faults, in an order and at moments by the seed, then the end of the run."""
        order = self.rng.sample(faults, len(faults))
        moments = sorted(self.rng.choices(range(1, int(FAULTS_UNTIL * steps)), k=len(order)))
        for fault, moment in zip(order, moments, strict=True):
            if not self.reached(moment):
                break
            kinds = self.victims()
            kind = self.rng.choice([*sorted(kinds), self.rng.choice(["runner", "all"])])
            chosen = self.rng.choice(kinds.get(kind) or [psutil.Process(self.run.process.pid)])
            (self._kill if fault == "kill" else self._freeze)(kind, chosen)
            self.done[f"{fault} {kind}"] += 1
        code = self.run.process.wait(PATIENCE_S)
        assert code == 0 or (code == -signal.SIGKILL and self._has_ended), self.explain()

    def victims(self) -> dict[str, list[psutil.Process]]:
        """Living processes by kind, without the runner."""
        found: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.Error):
            for process in psutil.Process(self.run.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.setdefault(kind_of(process), []).append(process)
        return found

    def _kill(self, kind: str, chosen: psutil.Process) -> None:
        if kind not in ("all", "runner"):
            with suppress(psutil.NoSuchProcess):
                chosen.kill()
            return
        family = [one for of_kind in self.victims().values() for one in of_kind] if kind == "all" else []
        self.run.process.kill()
        self.run.process.wait(PATIENCE_S)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.wait_alone()
        self.run.assert_exact()
        if not self._has_ended:
            self.run.resume()

    def _freeze(self, kind: str, chosen: psutil.Process) -> None:
        stopped = [one for of_kind in self.victims().values() for one in of_kind] if kind == "all" else []
        stopped.append(chosen)
        for one in stopped:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        until_s = time.monotonic() + FROZEN_BOUNDS * self.bound_s
        wait_for(
            lambda: time.monotonic() > until_s or not any(_lives(one) for one in stopped),
            what="the end of a freeze",
            deadline_s=PATIENCE_S,
        )
        for one in stopped:
            with suppress(psutil.NoSuchProcess):
                one.resume()

    def reached(self, step: int) -> bool:
        """Wait for a step; False if the run ended well before something could be done to it."""
        wait_for(
            lambda: self.run.steps() >= step or self.run.process.poll() is not None,
            what=f"step {step}; {self.explain()}",
            deadline_s=PATIENCE_S,
        )
        assert self.run.process.poll() in (None, 0), self.explain()
        return self.run.process.poll() is None and not self._has_ended

    @property
    def _has_ended(self) -> bool:
        """All steps are taken; what is left is the runner's report."""
        return (self.run.folder / FILE_RESULT).exists()

    def wait_alone(self) -> None:
        """Until no process of the run is left."""
        mark = os.environ[MARK]
        wait_for(lambda: not [*left_over(mark)], what="an end of all", deadline_s=ALIVE_AGAIN_S)

    def assert_exact(self, *, steps: int, groups: int) -> None:
        """Ended well, each group was trained once, and no process is left."""
        self.wait_alone()
        result = self.run.result()
        assert (result["status"], self.run.steps()) == ("succeeded", steps), self.explain()
        assert result["check"]["consumed"] == steps * groups, result
        self.run.assert_exact()

    def assert_replayed(self, *, steps: int) -> None:
        """The samples make the same weights."""
        replayed = streamrl("replay", str(self.run.folder), deadline_s=PATIENCE_S)
        same = f"{steps} steps replayed: {steps + 1} of {steps + 1} versions compared, all are the same\n"
        assert replayed.stdout.endswith(same), replayed.stdout + replayed.stderr

    def assert_explained(self) -> None:
        """Each warning follows from what was done."""
        unexplained = [line for line in self.warnings() if not any(re.search(one, line) for one in EXPLAINED)]
        assert not unexplained, "\n".join(unexplained)

    def warnings(self) -> list[str]:
        """Lines of all logs that warn."""
        return [
            f"{file.name}: {line}"
            for file in [*(self.run.folder / "logs").glob("*.log"), self.run.folder.parent / "run.out"]
            for line in file.read_text(errors="replace").splitlines()
            if _SAYS.search(line)
        ]

    def sums(self, *names: str) -> Counter[str]:
        """Counts over all steps."""
        found: Counter[str] = Counter()
        for line in read_jsonl(self.run.folder / "metrics" / "steps.jsonl"):
            for name in names:
                value = line.get(name) or 0
                found[name] += sum(value.values()) if isinstance(value, dict) else value
        return found

    def explain(self) -> str:
        """For a failure's message."""
        return f"{dict(self.done)}; {self.run.logs()}"


def kind_of(process: psutil.Process) -> str:
    """Which part of a run it is: a module's name, or its program's."""
    command = process.cmdline()
    module = next((word for word in command if word.startswith("streamrl_workers.")), "")
    if module.endswith("fork_server_process"):
        return "task worker" if _is_forked(process) else "fork server"
    return module.removeprefix("streamrl_workers.") or "program"


def _is_forked(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def left_over(mark: str) -> Iterator[psutil.Process]:
    """Living processes that have this mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and _lives(process):
                yield process


Build = Callable[[Path], dict[str, Any]]
