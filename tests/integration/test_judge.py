"""A run whose rewards come from a model that judges, on a server of its own: the scheduler is killed, and the budget holds over all its lives."""

import json
from pathlib import Path

import pytest

from streamrl.errors import EXIT_USER_ERROR
from streamrl.keys import FILE_JUDGED
from support.endpoints import judge, serving
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for

STEPS = 12
BUDGET = 150
"""Of the 216 samples at least that the run needs: 12 steps of 16, three evaluations of 8."""


@pytest.mark.timeout(300)
def test_a_run_sends_no_more_than_its_budget_and_goes_on_with_a_greater_one(tmp_path: Path) -> None:
    job = simulated_job(steps=STEPS)
    write_prompts(tmp_path / "prompts.jsonl")
    with serving(judge) as endpoint:
        chat = {"model": "judge", "prompt": "Right? {completion}"}
        options = {"url": endpoint.url, "maxSamples": BUDGET, "chat": chat}
        job["spec"]["task"]["rewards"] = [{"name": "judge", "timeoutSeconds": 30.0, "http": options}]
        run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
        for sent in (30, 60, 90):
            wait_for(lambda sent=sent: len(endpoint.bodies) >= sent, what=f"{sent} requests; {run.logs()}")
            run.kill_one("scheduler")
        assert run.wait_end() == EXIT_USER_ERROR
        assert f"spec.task.rewards.0.http.maxSamples: is spent: this run has sent {BUDGET} samples" in run.said()
        assert (run.folder / FILE_JUDGED).read_text() == f"{BUDGET}\n"
        first_tries = sum(number % 20 != 7 for number in range(len(endpoint.bodies)))
        assert BUDGET - 32 * 4 < first_tries <= BUDGET, "what was on its way at a death is counted, and never came"
        run.assert_exact()
        assert run.steps() < STEPS

        file = run.folder / "job.json"
        raised = json.loads(file.read_text())
        raised["spec"]["task"]["rewards"][0]["http"]["maxSamples"] = 100_000
        file.write_text(json.dumps(raised))
        run.resume()
        assert run.wait_end() == 0, run.logs()
        run.assert_exact()
        assert run.steps() == STEPS
    assert {body["model"] for body in endpoint.bodies} == {"judge"}
    assert all(body["messages"][0]["content"].startswith("Right? ") for body in endpoint.bodies)
