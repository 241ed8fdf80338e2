"""A job's pods: real processes with the operator's environment and certificates, a simulated engine, no cluster."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR
from streamrl_workers.scheduler.journal.store import open_for_writing
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.pods import Pods
from support.runs import wait_for

STEPS = 12
LONGEST_MESSAGE_BYTES = 4096
"""That a kubelet takes."""
LEASE_S = 60.0
"""No generator is given up on a busy machine."""


def make(base: Path, *, secure: bool = True, held: bool = False) -> Pods:
    """`held`: by a gate in its run folder."""
    job = simulated_job(steps=STEPS)
    job["metadata"]["namespace"] = "team"
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.02}
    if held:
        job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
        job["spec"]["task"]["rewards"] = [REWARD]
    pods = Pods.make(job, base=base, secure=secure)
    write_prompts(pods.run_dir / "prompts.jsonl")
    return pods


@pytest.fixture(params=[True, False], ids=["certificates", "token"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    made = make(tmp_path / "pods", secure=request.param)
    yield made
    made.close()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Pods]:
    made = make(tmp_path / "pods")
    yield made
    made.close()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Pods, Gate]]:
    """A job that is trained as far as the gate lets it."""
    made = make(tmp_path / "pods", held=True)
    yield made, Gate.shut(made.run_dir)
    made.close()


def reaches(pods: Pods, step: int) -> Callable[[], bool]:
    return lambda: pods.numbers().get("step", 0) >= step


def test_a_job_runs_and_its_processes_stay_until_they_are_told_to_end(pods: Pods) -> None:
    pods.start_all(generators=2)
    both = {"generator-sim-0", "generator-sim-1"}
    wait_for(lambda: {line["id"] for line in pods.numbers()["generators"]} == both, what=f"both; {pods.logs()}")
    result = pods.wait_result()
    assert (result["status"], result["steps"]) == ("succeeded", STEPS)
    assert result["checkpoint"] == f"checkpoints/step-{STEPS:08d}"
    page = pods.numbers()
    assert (page["ended"], page["step"], page["checkpoint_step"]) == (True, STEPS, STEPS)
    assert page["reward"] == result["final_reward"]
    for container in ("scheduler", "trainer"):
        wait_for(lambda c=container: pods.page(c, "healthz") == (200, "ok\n"), what=f"{container} to be idle")
        assert not pods.ended(container), pods.text(container)
    assert (pods.store / result["checkpoint"] / "meta.json").exists()
    assert (pods.store / "model" / "simulated.json").exists()
    assert not (pods.run_dir / "checkpoints").exists()
    assert "checkpoint step-00000012" in pods.assert_exact()
    for name in ("trainer", "scheduler", "simulated-sim-0", "simulated-sim-1"):
        assert not pods.ended(name), pods.text(name)
        assert pods.terminate(name) == EXIT_DONE, pods.text(name)


@pytest.mark.soak
def test_started_again_when_the_run_has_ended_they_show_the_result_and_do_nothing(secure: Pods) -> None:
    secure.start_all()
    before = secure.wait_result()
    for name in ("scheduler", "trainer"):
        secure.kill(name)
        secure.start(name)
    assert secure.wait_result() == before
    assert secure.numbers()["step"] == STEPS
    wait_for(lambda: secure.page("trainer", "healthz")[0] == 200, what=f"the trainer to be idle; {secure.logs()}")
    steps = (secure.run_dir / "metrics" / "steps.jsonl").read_text()
    assert len(steps.splitlines()) == STEPS
    assert secure.terminate("trainer") == secure.terminate("scheduler") == EXIT_DONE
    secure.assert_exact()


def test_the_schedulers_container_ends_once_with_how_the_run_ended(secure: Pods) -> None:
    message, kept = secure.base / "termination-log", secure.base / "kept"
    told = {keys.ENV_TERMINATION_FILE: str(message), "TMPDIR": str(kept)}  # a job may mount a claim there
    message.touch()
    kept.mkdir()
    secure.start_generator()
    secure.start("scheduler", **told)
    secure.start("trainer")
    assert secure.wait("scheduler") == EXIT_DONE, secure.text("scheduler")
    word = json.loads(message.read_text())
    assert word["result"]["status"] == "succeeded"
    assert (word["result"]["steps"], word["step"], word["attempt"]) == (STEPS, STEPS, 1)
    assert message.stat().st_size < LONGEST_MESSAGE_BYTES
    message.write_text("")
    secure.start("scheduler", **told)  # by the kubelet, in the same pod
    assert secure.wait_result()["steps"] == STEPS
    secure.kill("scheduler")
    assert json.loads(message.read_text()) == word  # whatever ends this life, it has said how the run ended
    shutil.rmtree(secure.base / "shared" / keys.DIR_HEARTBEATS)  # another pod
    message.write_text("")
    secure.start("scheduler", **told)
    assert secure.wait("scheduler") == EXIT_DONE, secure.text("scheduler")
    assert json.loads(message.read_text()) == word


def test_killed_containers_cost_nothing(secure: Pods) -> None:
    secure.start_all(generators=2)
    for step, name in ((2, "scheduler"), (4, "trainer"), (6, "simulated-sim-1")):
        secure.wait_step(step)
        secure.kill(name)
        if name.startswith("simulated"):
            secure.start_generator(1)
        else:
            secure.start(name)
    assert secure.wait_result()["status"] == "succeeded", secure.logs()
    secure.assert_exact()


def test_a_suspended_pod_goes_on_from_its_volumes(held: tuple[Pods, Gate]) -> None:
    secure, gate = held
    secure.start_all()
    gate.until(reaches(secure, 3), what=f"step 3; {secure.logs()}")
    assert secure.terminate("trainer") == EXIT_DONE, secure.text("trainer")
    assert secure.terminate("scheduler") == EXIT_RETRY, secure.text("scheduler")
    assert not (secure.run_dir / keys.FILE_RESULT).exists()
    assert "checkpoint step-" in secure.assert_exact()
    gate.open()
    secure.start("scheduler")
    secure.start("trainer")
    assert secure.wait_result()["steps"] == STEPS
    secure.assert_exact()


def test_a_run_whose_own_check_fails_is_a_failed_job(held: tuple[Pods, Gate]) -> None:
    """Exit code 2 for the failure policy, and a result for the operator, also once the container is started again."""
    pods, gate = held
    pods.start_all()
    gate.until(reaches(pods, 8), what=f"step 8; {pods.logs()}")
    assert pods.terminate("scheduler") == EXIT_RETRY, pods.text("scheduler")
    with closing(open_for_writing(pods.run_dir / keys.FILE_JOURNAL)) as journal:
        journal.execute("DELETE FROM groups WHERE group_id = 3")
    gate.open()
    pods.start("scheduler")
    assert pods.wait("scheduler") == EXIT_USER_ERROR, pods.text("scheduler")
    assert "own check fails: group 3 " in pods.last_line("scheduler")
    pods.start("scheduler")
    result = pods.wait_result()
    assert result["status"] == "failed"
    assert all("group 3 " in violation for violation in result["check"]["violations"])
    assert result["check"]["violations"]


def test_a_generator_that_is_told_to_end_finishes_what_it_has(held: tuple[Pods, Gate]) -> None:
    secure, gate = held
    secure.start_all(generators=2)
    gate.until(reaches(secure, 2), what=f"step 2; {secure.logs()}")
    assert secure.terminate("simulated-sim-1") == EXIT_DONE, secure.text("simulated-sim-1")
    assert "generator generator-sim-1 is leaving" in secure.text("scheduler")
    gate.open()
    assert secure.wait_result()["status"] == "succeeded"
    assert secure.numbers()["reissued"] == 0, secure.logs()
    secure.assert_exact()


def test_a_users_error_is_the_last_line_and_the_result(secure: Pods) -> None:
    (secure.run_dir / "prompts.jsonl").unlink()
    secure.start("scheduler")
    assert secure.wait("scheduler") == EXIT_USER_ERROR, secure.text("scheduler")
    assert "prompts.jsonl" in secure.last_line("scheduler")
    secure.start("scheduler")  # the kubelet does, before anybody has seen it
    result = secure.wait_result()
    assert result["status"] == "failed"
    assert result["reason"] == secure.last_line("scheduler") or "prompts.jsonl" in result["reason"]
    assert secure.terminate("scheduler") == EXIT_DONE


def test_a_store_that_cannot_be_written_is_the_users_error(secure: Pods) -> None:
    secure.store.write_text("a file")
    secure.start("scheduler")
    secure.start("trainer")
    assert secure.wait("trainer") == EXIT_USER_ERROR, secure.text("trainer")
    assert secure.last_line("trainer").startswith(keys.ENV_STORE_DIR)


def test_the_journal_check_says_where_checkpoints_should_be(secure: Pods) -> None:
    secure.start_all()
    secure.wait_result()
    moved = secure.base / "mounted-elsewhere"
    secure.store.rename(moved)
    with pytest.raises(AssertionError, match=f"set {keys.ENV_STORE_DIR} to where that volume is mounted"):
        secure.assert_exact()


def test_pages_are_there_while_nothing_works_yet(secure: Pods) -> None:
    secure.start("trainer")  # no scheduler: a probe must not take it for dead
    wait_for(lambda: secure.page("trainer", "numbers")[0] == 200, what=f"numbers; {secure.logs()}")
    secure.start_generator()
    endpoint = secure.base / "simulated-sim-0" / keys.DIR_ENDPOINTS / "generator-sim-0.json"
    wait_for(endpoint.exists, what=f"the generator's endpoint; {secure.logs()}")
    secure.ports["generator"] = int(json.loads(endpoint.read_text())["signals"].rpartition(":")[2])
    assert secure.page("generator", "numbers")[0] == 200
    status, reason = secure.page("generator", "healthz")
    assert (status, "scheduler" in reason) == (503, True)
    secure.start("scheduler")
    for container in ("trainer", "generator"):
        wait_for(
            lambda c=container: secure.page(c, "healthz")[0] == 200, what=f"{container} to be well; {secure.logs()}"
        )
    secure.kill("scheduler")
    wait_for(lambda: secure.page("generator", "healthz")[0] == 503, what="the generator to miss its scheduler")
    assert secure.page("trainer", "healthz")[0] == 200


@pytest.mark.parametrize("name", ["scheduler", "trainer"])
def test_sigint_and_sigterm_are_heard_from_the_start(secure: Pods, name: str) -> None:
    secure.start("scheduler")
    secure.start("trainer")
    port = {"scheduler": "scheduler", "trainer": "trainer"}[name]
    wait_for(lambda: secure.page(port, "numbers")[0] == 200, what=f"{name} to be there; {secure.logs()}")
    secure.processes[name].send_signal(signal.SIGTERM)
    assert secure.wait(name) in (EXIT_DONE, EXIT_RETRY), secure.text(name)
