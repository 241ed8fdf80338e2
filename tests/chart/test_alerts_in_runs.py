"""Alerts of jobs in a real run: what they warn of is made to happen, a real Prometheus says that they fire, and that they clear.

The chart's rules, word for word, but for their windows and waits (`support.prometheus.faster`). One run, told by each case what to suffer.
A policy that runs away, and log-probs that differ: `test_policy_alerts.py`. What operators export: tests/cluster.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamrl.keys import ENV_SIGNALS_PORT, ENV_WEIGHTS_ADDRESS, ENV_WEIGHTS_PORT, FILE_JOB
from support import dashboards
from support.dashboards import ONLY_WHEN
from support.jobs import simulated_job, write_prompts
from support.ports import free_port
from support.prometheus import ALERT_S, Prometheus, chart_rules, faster, scraping
from support.runs import wait_for
from support.stalls import HeldLink
from support.worker_processes import Workers

pytestmark = pytest.mark.timeout(900)

SLOTS = 32
"""So many that a hundred rewards fail in a shortened window."""
STEP_S, SLOW_STEP_S = 2.0, 8.0
CHECKPOINT_STEPS, CHECKPOINT_S = 5, 20
"""Five steps take 10 seconds, slow ones 40."""
LATE_S = 1.0
"""Of each message on the way of the weights: a version takes several."""
GENERATOR, TRAINER = "generator-sim-0", "trainer-0"
_TASK = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def suffers(what):
    return (HERE / "suffers").read_text() == what

def slow_format(*, question, answer, metadata):
    if suffers("slow prompts"):
        time.sleep(4)
    return {"prompt": question, "target": answer}

def score(*, prompt, completion, answer, metadata):
    while suffers("waiting rewards"):
        time.sleep(0.05)
    if suffers("failing rewards") and completion != answer:
        raise ValueError("as the test says")
    if suffers("no rewards"):
        return 0.0
    return 0.5 if suffers("equal rewards") else float(completion == answer)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The run, and what can be done to it."""

    folder: Path
    workers: Workers
    weights: HeldLink
    weights_port: int
    """Of the trainer, at the other end of `weights`."""
    ports: dict[str, int]
    """Where each process is scraped, in each of its lives."""

    def start(self, process: str) -> None:
        variables = {ENV_SIGNALS_PORT: str(self.ports[process])}
        if process == TRAINER:
            variables |= {ENV_WEIGHTS_PORT: str(self.weights_port), ENV_WEIGHTS_ADDRESS: self.weights.address}
        self.workers.start(process, **variables)

    def until_it_goes_on(self) -> None:
        """An alert of a run that has ended is silent too."""
        steps = self.workers.lines("steps.jsonl")
        text = f"another step; {self.workers.text('scheduler')}"
        wait_for(lambda: len(self.workers.lines("steps.jsonl")) > len(steps), what=text, deadline_s=ALERT_S)

    @contextmanager
    def suffering(self, what: str) -> Iterator[None]:
        """By the task's own functions."""
        self.suffer(what)
        yield
        self.suffer("")

    def suffer(self, what: str) -> None:
        fresh = self.folder / "suffers.new"
        fresh.write_text(what)
        fresh.replace(self.folder / "suffers")

    @contextmanager
    def without_generators(self) -> Iterator[None]:
        self.workers.kill(GENERATOR)
        yield
        self.start(GENERATOR)

    @contextmanager
    def slow_trainer(self) -> Iterator[None]:
        self.train_at(SLOW_STEP_S)
        yield
        self.train_at(STEP_S)

    def train_at(self, step_s: float) -> None:
        """The trainer goes on from its checkpoint at this pace."""
        self.workers.kill(TRAINER)
        file = self.workers.folder / FILE_JOB
        job = json.loads(file.read_text())
        job["spec"]["trainer"]["engine"]["simulated"]["secondsPerStep"] = step_s
        file.write_text(json.dumps(job))
        self.start(TRAINER)

    @contextmanager
    def late_weights(self) -> Iterator[None]:
        self.weights.late_s = LATE_S
        yield
        self.weights.late_s = 0.0

    @contextmanager
    def misled_weights(self) -> Iterator[None]:
        """Who asks for weights gets to the scheduler, which has none."""
        self.weights.lead_to(f"127.0.0.1:{self.workers.scheduler_port}")
        yield
        self.weights.lead_to(f"127.0.0.1:{self.weights_port}")


CASES: dict[str, tuple[Callable[[Patient], AbstractContextManager[None]], set[str]]] = {
    "rewards wait": (
        lambda run: run.suffering("waiting rewards"),
        {"StreamRLJobStalled", "StreamRLTrainerStarved"},
    ),
    "rewards fail": (lambda run: run.suffering("failing rewards"), {"StreamRLRewardsFail"}),
    "rewards are equal": (lambda run: run.suffering("equal rewards"), {"StreamRLRewardsEqual"}),
    "prompts are slow": (lambda run: run.suffering("slow prompts"), {"StreamRLGeneratorsStarved"}),
    "generators are gone": (Patient.without_generators, {"StreamRLJobWithoutGenerators"}),
    "the trainer is slow": (Patient.slow_trainer, {"StreamRLStalenessBound", "StreamRLCheckpointOld"}),
    "weights are slow": (Patient.late_weights, {"StreamRLWeightSyncSlow"}),
    "weights are not there": (Patient.misled_weights, {"StreamRLWeightSyncFails"}),
}
"""What happens, and which alerts tell of it."""


def job() -> dict[str, Any]:
    """Generation is a little slower than training: nobody starves."""
    engine = {"slots": SLOTS, "meanTokens": 20.0, "sigma": 0.2, "latency": [{"batch": 1, "milliseconds": 65.0}]}
    made = simulated_job(replicas=1, steps=1_000_000, staleness=4, **engine)
    made["spec"]["scheduling"]["leaseSeconds"] = 20.0
    made["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": STEP_S}
    made["spec"]["storage"] = {"checkpoints": {"intervalSteps": CHECKPOINT_STEPS}}
    made["spec"]["task"] |= {
        "groupSize": SLOTS // 2,
        "processes": 1,  # which slow prompts keep busy
        "format": {"function": "suffering:slow_format"},
        "rewards": [{"name": "answer", "timeoutSeconds": 3600.0, "python": {"function": "suffering:score"}}],
        "evaluation": {"maxPrompts": 8, "intervalSteps": 10},
    }
    return made


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    folder = tmp_path_factory.mktemp("patient")
    write_prompts(folder / "prompts.jsonl")
    (folder / "suffering.py").write_text(_TASK)
    workers, weights = Workers.prepare(job(), folder=folder / "run"), HeldLink()
    ports = {process: free_port() for process in ("scheduler", TRAINER, GENERATOR)}
    run = Patient(folder=folder, workers=workers, weights=weights, weights_port=free_port(), ports=ports)
    run.suffer("no rewards")
    try:
        run.start("scheduler")
        workers.endpoint("scheduler")
        run.start(TRAINER)
        with weights.to(f"127.0.0.1:{run.weights_port}"):
            run.start(GENERATOR)
            wait_for(lambda: workers.lines("evaluations.jsonl"), what=f"an evaluation; {workers.text('scheduler')}")
            run.suffer("")
            yield run
    finally:
        workers.close()


@pytest.fixture(scope="module")
def watching(patient: Patient, prometheus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the chart's rules."""
    targets = {"streamrl": [f"127.0.0.1:{port}" for port in patient.ports.values()]}
    with scraping(
        targets, folder=tmp_path_factory.mktemp("prometheus"), rules=chart_rules(checkpoint_s=CHECKPOINT_S)
    ) as made:
        yield made


def test_a_rise_of_the_held_out_reward_has_its_price(watching: Prometheus) -> None:
    """The first evaluation found no answer right, and later ones do."""
    (metric,) = (name for name in ONLY_WHEN if name.startswith("streamrl_cost_"))
    asked = [one.expr for one in dashboards.panel_queries({"namespace": "local", "job": ".*"}) if metric in one.expr]
    assert asked
    wait_for(lambda: all(watching.has_data(expr) for expr in asked), what=f"data for {asked}", deadline_s=ALERT_S)


@pytest.mark.parametrize("what", CASES)
def test_an_alert_fires_when_it_should_and_clears(watching: Prometheus, patient: Patient, what: str) -> None:
    happens, names = CASES[what]
    watching.wait_silent(*names)
    with happens(patient):
        watching.wait_firing(*names)
    watching.wait_silent(*names)
    patient.until_it_goes_on()


def test_windows_and_waits_are_shortened() -> None:
    text = "expr: rate(a[15m]) > avg_over_time(b[30m] offset 6h)\nfor: 5m\n"
    assert faster(text) == "expr: rate(a[15000ms]) > avg_over_time(b[30000ms] offset 360000ms)\nfor: 5000ms\n"
