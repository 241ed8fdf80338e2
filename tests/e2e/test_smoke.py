"""The shortest way through it all: a job of simulated engines on a real node, by an operator that runs on this machine."""

import stat

import pytest

from cluster.operators import Operator
from e2e.jobs import simulated
from e2e.stage import Stage
from streamrl import names
from support.command import streamrl

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, STEP_S = 12, 2.0
"""Twenty seconds are left after the first step: for commands in pods of the job that runs."""


def test_a_job_runs_to_its_end_and_only_its_volumes_stay(
    watched: tuple[Stage, Operator], capsys: pytest.CaptureFixture[str]
) -> None:
    stage, operator = watched
    stage.apply(simulated(steps=STEPS, step_s=STEP_S))
    stage.wait_step("sim", 1)
    assert _is_encrypted(stage, "sim")
    where = ("--kubeconfig", str(stage.cluster.kubeconfig), "-n", stage.namespace)
    samples = streamrl(capsys, "samples", "sim", "--step", "0", "--best", *where)
    assert (samples.code, samples.err) == (0, []), samples
    assert samples.out[0].startswith("best: step 0, group ")
    status = stage.wait_succeeded("sim")
    assert (status["step"], status["attempt"], status["restarts"]) == (STEPS, 1, 0), operator.tail()
    assert status["reward"] > 0
    samples = streamrl(capsys, "samples", "sim", "--step", "0", "--best", *where)
    assert (samples.code, samples.err) == (0, []), "read after the end"
    assert samples.out[0].startswith("best: step 0, group ")
    assert f"checkpoint step-{STEPS:08d}" in stage.assert_exact("sim")
    path = stage.nodes.the_node.volume_path(stage.namespace, names.checkpoints_claim("sim")) / status["checkpointPath"]
    assert (path / "meta.json").is_file()
    assert _owner(stage) == 10001
    events = {one["reason"] for one in stage.list("events")}
    assert {"Started", "Succeeded"} <= events
    assert stage.made("sim")["persistentvolumeclaims"] == {"sim-journal", "sim-checkpoints"}


def _is_encrypted(stage: Stage, job: str) -> bool:
    """Whether the scheduler's gRPC port speaks TLS: the generator's log has no line about a plain one, and its files are there."""
    name = next(name for name in stage.pods(job) if not name.startswith(names.trainer(job)))
    found = stage.kubectl("exec", name, "--", "python", "-c", TLS, f"{names.scheduler(job)}", str(names.PORT_GRPC))
    return found.split()[:1] == ["TLSv1.3"]


TLS = f"""
import socket, ssl, sys
files = "{names.DIR_TLS}"
context = ssl.create_default_context(cafile=files + "/ca.crt")
context.load_cert_chain(files + "/tls.crt", files + "/tls.key")
context.set_alpn_protocols(["h2"])
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as plain:
    with context.wrap_socket(plain, server_hostname=sys.argv[1]) as secure:
        print(secure.version(), secure.selected_alpn_protocol())
"""


def _owner(stage: Stage) -> int:
    journal = stage.run_dir("sim") / "journal.sqlite"
    assert stat.S_ISREG(journal.stat().st_mode)
    return journal.stat().st_uid
