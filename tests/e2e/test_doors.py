"""Who gets in on a real node: mTLS at the scheduler's port in its pod, and NetworkPolicies as a matrix of flows."""

import json
from base64 import b64decode
from collections.abc import Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from cluster.harness import pods
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.pods import python_pod, wait_ready
from e2e.conftest import a_stage
from e2e.jobs import simulated
from e2e.release import NAMESPACE, Release
from e2e.stage import Stage
from streamrl import names
from support.certificates import Authority, Leaf

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

ONE, TWO = "one", "two"
START_S = 240.0


@pytest.fixture(scope="module")
def both(release: Release) -> Iterator[Stage]:
    """Two jobs that go on until all is asked."""
    with a_stage(release.cluster, "doors") as stage:
        stage.apply(*(simulated(name, steps=100_000, step_s=1.0, replicas=2) for name in (ONE, TWO)))
        for job in (ONE, TWO):
            stage.wait_step(job, 1, deadline_s=START_S)
        release.cluster.the_node.wait_policies()
        yield stage


# ---- Certificates

GET_MODEL = """
import json, sys, grpc
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import SCHEDULER, client

def ask(case):
    options = (("grpc.ssl_target_name_override", case["host"]), ("grpc.enable_retries", 0))
    files = [None if case[name] is None else case[name].encode() for name in ("ca", "key", "chain")]
    if case["ca"] is None:
        channel = grpc.insecure_channel(case["address"])
    else:
        channel = grpc.secure_channel(case["address"], grpc.ssl_channel_credentials(*files), options)
    with channel:
        try:
            list(client(channel, SCHEDULER).GetModel(pb.ModelRequest(), timeout=20))
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""

print(json.dumps([ask(case) for case in json.load(sys.stdin)]))
"""


def secret(stage: Stage, name: str) -> dict[str, bytes]:
    return {key: b64decode(value) for key, value in stage.must("secrets", name)["data"].items()}


def authority(stage: Stage, job: str) -> Authority:
    """The job's own, with its key: nobody but the operator has that."""
    data = secret(stage, names.ca_secret(job))
    made = Authority(key=serialization.load_pem_private_key(data["ca.key"], None))  # type: ignore[arg-type]
    made.certificate = x509.load_pem_x509_certificate(data["ca.crt"])
    return made


def leaf_of(stage: Stage, made: Authority, role: str = "generator", **changes: bool) -> Leaf:
    return made.leaf(role, namespace=stage.namespace, job=ONE, **changes)


def pems(leaf: Leaf) -> tuple[str, str]:
    return leaf.key_pem.decode(), leaf.chain.decode()


def test_only_a_generator_of_the_job_gets_a_model(both: Stage) -> None:
    ours, others = authority(both, ONE), secret(both, names.tls_secret(TWO, "generator"))
    trusted = ours.pem.decode()
    cases: dict[str, tuple[str | None, str | None, str | None]] = {
        "a generator of the job": (trusted, *pems(leaf_of(both, ours))),
        "no TLS": (None, None, None),
        "no certificate": (trusted, None, None),
        "a foreign authority": (trusted, *pems(leaf_of(both, Authority("foreign")))),
        "expired": (trusted, *pems(leaf_of(both, ours, expired=True))),
        "another job's": (trusted, others["tls.key"].decode(), others["tls.crt"].decode()),
        "another role's": (trusted, *pems(leaf_of(both, ours, "trainer"))),
        "the wrong server": (Authority("foreign").pem.decode(), *pems(leaf_of(both, ours))),
    }
    said = dict(zip(cases, ask(both, list(cases.values())), strict=True))
    code, text = said.pop("a generator of the job")
    assert (code, "handshake" in text.lower()) == ("UNAVAILABLE", False), text
    assert "model" in text, f"it was let in, and a simulated job has no model: {text}"
    assert said.pop("another role's")[0] == "PERMISSION_DENIED"
    assert {code for code, _ in said.values()} == {"UNAVAILABLE"}, said
    assert not any("model" in text for _, text in said.values()), said


def ask(stage: Stage, cases: list[tuple[str | None, str | None, str | None]]) -> list[tuple[str, str]]:
    """Code and text of each call, made from within a generator's pod: nobody else has a way to the port."""
    host = names.scheduler(ONE)
    every = [
        {"address": f"{host}:{names.PORT_GRPC}", "host": host, "ca": ca, "key": key, "chain": chain}
        for ca, key, chain in cases
    ]
    command = ("exec", "-i", f"{names.pool(ONE, 'sim')}-0", "--", "python", "-c", GET_MODEL)
    said = stage.kubectl(*command, stdin=json.dumps(every))
    return [(code, text) for code, text in json.loads(said)]


# ---- Flows

REACH = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def reach(target):
    try:
        socket.create_connection(target[1:], timeout=2).close()
        return True
    except OSError:
        return False

targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    print(json.dumps([target[0] for target, there in zip(targets, pool.map(reach, targets)) if there]))
"""
SIGNALS = {"trainer:signals", "trainer:trainer-signals", "generator:signals", "operator:metrics"}
REACHES: dict[str, set[str]] = {
    "generator": {"trainer:grpc", "trainer:weights", "generator:weights"},
    "other job's generator": set(),
    "trainer": {"generator:signals", "operator:metrics", "api"},
    "other job's trainer": SIGNALS | {"api"},
    "operator": {"api", "trainer:signals"},
    "neighbour": SIGNALS | {"api"},
    "stranger": SIGNALS | {"api"},
}
"""Who -> what of job `one`, of the operator and of the API server; its own ports aside. `generator` is the other one where one of them
asks. Signals are numbers, open to all."""


def test_who_reaches_whom(release: Release, both: Stage) -> None:
    node, far = release.cluster.the_node, f"far-{both.namespace}"
    pods.make_namespace(node.objects, far, {})
    sleep = "import time; time.sleep(3600)"
    release.cluster.apply(
        python_pod("neighbour", both.namespace, sleep, WORKER_IMAGE), python_pod("stranger", far, sleep, WORKER_IMAGE)
    )
    for namespace, name in ((both.namespace, "neighbour"), (far, "stranger")):
        wait_ready(node.objects, namespace, name)
    node.wait_policies()
    operator = release.pod()
    where = {
        "generator": (both.namespace, f"{names.pool(ONE, 'sim')}-0"),
        "other job's generator": (both.namespace, f"{names.pool(TWO, 'sim')}-0"),
        "trainer": (both.namespace, f"{names.trainer(ONE)}-0"),
        "other job's trainer": (both.namespace, f"{names.trainer(TWO)}-0"),
        "operator": (NAMESPACE, operator["metadata"]["name"]),
        "neighbour": (both.namespace, "neighbour"),
        "stranger": (far, "stranger"),
    }
    found = {who: reached(release, place, targets(release, both, but=who)) for who, place in where.items()}
    node.objects.delete(f"/api/v1/namespaces/{far}")
    node.objects.delete(f"/api/v1/namespaces/{both.namespace}/pods/neighbour")
    assert found == REACHES


def targets(release: Release, stage: Stage, *, but: str) -> list[tuple[str, str, int]]:
    """(name, address, port) of all that could be reached."""
    running = stage.pods(ONE)
    address = {
        "trainer": running[f"{names.trainer(ONE)}-0"]["status"]["podIP"],
        "generator": running[f"{names.pool(ONE, 'sim')}-1"]["status"]["podIP"],
        "operator": release.pod()["status"]["podIP"],
    }
    ports = {
        "trainer": {
            "grpc": names.PORT_GRPC,
            "weights": names.PORT_WEIGHTS,
            "signals": names.PORT_SIGNALS,
            "trainer-signals": names.PORT_TRAINER_SIGNALS,
        },
        "generator": {"weights": names.PORT_WEIGHTS, "signals": names.PORT_SIGNALS},
        "operator": {"metrics": 8080},
    }
    every = [
        (f"{owner}:{name}", address[owner], port)
        for owner, named in ports.items()
        for name, port in named.items()
        if owner != but or owner == "generator"
    ]
    api = stage.cluster.api.get("/api/v1/namespaces/default/services/kubernetes").expect()["spec"]["clusterIP"]
    return [*every, ("api", api, 443)]


def reached(release: Release, place: tuple[str, str], aims: list[tuple[str, str, int]]) -> set[str]:
    namespace, name = place
    return set(
        json.loads(pods.execute(release.cluster, namespace, name, "python3", "-c", REACH, json.dumps(aims)).stdout)
    )
