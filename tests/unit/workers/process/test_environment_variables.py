"""What a worker's environment says of the place that it runs in, and whose certificates it takes for its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.keys import ENV_CPUS
from streamrl.proto import stream_pb2 as pb
from streamrl_operator.autoscaler.values import generator_name
from streamrl_operator.tls_secrets import Holder, Lives, new_ca, new_leaf
from streamrl_workers.generator.settings import _name_in_pod
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    cpus,
    job_file,
    pin_to_cpus,
    store_dir,
    worker_variables,
)
from streamrl_workers.stream.auth import ROLES, WEIGHTS_PATH, PeerIdentity, parse_identity
from streamrl_workers.stream.run_folder import ModelTimeoutError, await_model_path, read_model_path, write_model_path
from streamrl_workers.stream.tls import Tls
from support.certificates import Authority, mount

TOKEN = {keys.ENV_TOKEN: "secret"}


def test_with_none_of_the_variables_it_is_a_local_run(tmp_path: Path) -> None:
    assert worker_variables(TOKEN) == WorkerVariables(
        bind_host="127.0.0.1", token="secret", tls=None, serve_until_told=False
    )
    assert job_file({}, run_dir=tmp_path) == tmp_path / "job.json"
    assert store_dir({}, run_dir=tmp_path) == tmp_path
    assert read_model_path({}) is None


def test_each_of_them_is_read(tmp_path: Path) -> None:
    ca = Authority()
    mount(tmp_path, trusted=(ca,), leaf=ca.leaf("trainer"))
    environ = {
        keys.ENV_BIND_HOST: "::",
        keys.ENV_TLS_DIR: str(tmp_path),
        keys.ENV_STAY: "1",
        keys.ENV_CONNECTION_AGE: "12.5",
        keys.ENV_JOB_FILE: "/job",
        keys.ENV_STORE_DIR: "/store",
    }
    found = worker_variables(environ)
    assert (found.bind_host, found.token, found.serve_until_told) == ("::", "", True)
    assert found.tls is not None
    assert (found.tls.identity, found.tls.age_s) == (
        PeerIdentity(namespace="team", job="simulated", role="trainer"),
        12.5,
    )
    assert (job_file(environ, run_dir=tmp_path), store_dir(environ, run_dir=tmp_path)) == (Path("/job"), Path("/store"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (keys.ENV_BIND_HOST, "everywhere"),
        (keys.ENV_STAY, "yes"),
        (keys.ENV_TOKEN, ""),
        (keys.ENV_TLS_DIR, "/nowhere"),
    ],
)
def test_mistakes_name_their_variable(key: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{key}"):
        worker_variables(TOKEN | {key: value})


@pytest.mark.parametrize("age", ["0", "-1", "nan", "inf", "soon"])
def test_a_connections_age_is_a_number_above_0(tmp_path: Path, age: str) -> None:
    ca = Authority()
    mount(tmp_path, trusted=(ca,), leaf=ca.leaf("trainer"))
    with pytest.raises(UserError, match=f"^{keys.ENV_CONNECTION_AGE}: must be a number above 0"):
        worker_variables({keys.ENV_TLS_DIR: str(tmp_path), keys.ENV_CONNECTION_AGE: age})


@pytest.mark.parametrize(("pool", "ordinal"), [("sim", 0), ("a-b", 17)])
def test_a_generator_in_a_pod_has_the_name_that_the_operator_looks_for(pool: str, ordinal: int) -> None:
    environ = {keys.ENV_POD_NAME: f"my-job-{pool}-{ordinal}"}
    assert _name_in_pod(environ, pool=pool) == generator_name(pool, ordinal=ordinal)


@pytest.mark.parametrize("pod", ["sim-0", "job-sim", "job-sim-x", "job-other-0"])
def test_another_pods_name_is_refused(pod: str) -> None:
    with pytest.raises(UserError, match=keys.ENV_POD_NAME):
        _name_in_pod({keys.ENV_POD_NAME: pod}, pool="sim")


def test_every_call_has_its_role() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(ROLES) == methods | {WEIGHTS_PATH}


@pytest.mark.parametrize(
    "uri", ["", "streamrl://a/b", "streamrl://a/b/c/d", "streamrl://a/b/generator/", "https://a/b/c", "streamrl:///b/c"]
)
def test_other_uris_name_nobody(uri: str) -> None:
    assert parse_identity(uri) is None


def test_a_generators_uri_may_name_a_member_cluster() -> None:
    found = parse_identity("streamrl://a/b/generator/east")
    assert found == PeerIdentity(namespace="a", job="b", role="generator", cluster="east")
    assert str(found) == "streamrl://a/b/generator/east"


@pytest.mark.parametrize("role", ["scheduler", "trainer", "generator"])
def test_the_operators_leaves_are_taken(tmp_path: Path, role: Any) -> None:
    now, lives = datetime.now(UTC), Lives(ca_s=86_400, leaf_s=3600)
    ca = new_ca("job", now=now, lives=lives)
    leaf = new_leaf(Holder(namespace="team", job="job", role=role), ca=ca, now=now, lives=lives)
    for name, data in {"ca.crt": ca.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}.items():
        (tmp_path / name).write_bytes(data)
    tls = Tls(tmp_path)
    assert tls.identity == PeerIdentity(namespace="team", job="job", role=role)
    tls.channel_credentials()
    tls.server_credentials()


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        ("tls.crt", b"no certificate", "must hold"),
        ("ca.crt", b"", "must hold"),
        ("tls.key", b"no key", "must hold"),
        ("ca.crt", None, "No such file"),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, file: str, data: bytes | None, reason: str) -> None:
    ca = Authority()
    mount(tmp_path, trusted=(ca,), leaf=ca.leaf("trainer"))
    path = tmp_path / "..data" / file
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(UserError, match=reason) as caught:
        Tls(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_leaf_without_a_role_is_refused(tmp_path: Path) -> None:
    ca = Authority()
    mount(tmp_path, trusted=(ca,), leaf=ca.leaf("x", uris=("https://example.org",)))
    with pytest.raises(UserError, match="must have one URI"):
        Tls(tmp_path)


async def test_the_models_place_is_awaited(tmp_path: Path) -> None:
    environ = {keys.ENV_SHARED_DIR: str(tmp_path)}
    with pytest.raises(ModelTimeoutError, match=r"waited 0 s in vain for .*model\.json"):
        await await_model_path(environ, timeout_s=0)
    write_model_path(tmp_path / keys.FILE_MODEL, directory=Path("/store/model"))
    assert await await_model_path(environ, timeout_s=0) == read_model_path(environ) == "/store/model"
    assert read_model_path(environ | {keys.ENV_MODEL_PATH: "/given"}) == "/given"
    assert await await_model_path({}, timeout_s=0) is None
    (tmp_path / keys.FILE_MODEL).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_model_path(environ)


def affinity_after(text: str | None) -> set[int]:
    """What a thread may use after it was pinned; the process's own threads stay as they are."""
    environ = {} if text is None else {ENV_CPUS: text}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pin_to_cpus, environ).result()
        return set(pool.submit(os.sched_getaffinity, 0).result())


def test_a_thread_is_pinned_to_what_is_listed() -> None:
    usable = os.sched_getaffinity(0)
    one = min(usable)
    assert affinity_after(str(one)) == {one}
    assert affinity_after(", ".join(map(str, usable))) == usable
    assert affinity_after(None) == affinity_after("") == usable


@pytest.mark.parametrize("text", ["0,x", "-1", "1.5", "0;1"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"{ENV_CPUS}: must be CPU numbers"):
        cpus({ENV_CPUS: text})


def test_a_cpu_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match=f"{ENV_CPUS}: must be CPUs that this process may use"):
        pin_to_cpus({ENV_CPUS: "1000"})
