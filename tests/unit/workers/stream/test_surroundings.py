"""What a worker's environment says of the place that it runs in, and whose certificates it takes for its own."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_operator.autoscaler.observation import generator_name
from streamrl_operator.certificates.issue import Holder, Lives, new_ca, new_leaf
from streamrl_workers.generator.settings import _name_in_pod
from streamrl_workers.stream.environ import Surroundings, job_file, store_dir, surroundings
from streamrl_workers.stream.model_place import ModelTimeoutError, await_model_place, model_place, write_model_place
from streamrl_workers.stream.roles import ROLES, Identity, parse_identity
from streamrl_workers.stream.tls import Tls
from support.certificates import Authority, mount

TOKEN = {keys.ENV_TOKEN: "secret"}


def test_with_none_of_the_variables_it_is_a_local_run(tmp_path: Path) -> None:
    assert surroundings(TOKEN) == Surroundings(bind_host="127.0.0.1", token="secret", tls=None, stay=False)
    assert job_file({}, run_dir=tmp_path) == tmp_path / "job.json"
    assert store_dir({}, run_dir=tmp_path) == tmp_path
    assert model_place({}) is None


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
    found = surroundings(environ)
    assert (found.bind_host, found.token, found.stay) == ("::", "", True)
    assert found.tls is not None
    assert (found.tls.identity, found.tls.age_s) == (Identity(namespace="team", job="simulated", role="trainer"), 12.5)
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
        surroundings(TOKEN | {key: value})


@pytest.mark.parametrize("age", ["0", "-1", "nan", "inf", "soon"])
def test_a_connections_age_is_a_number_above_0(tmp_path: Path, age: str) -> None:
    ca = Authority()
    mount(tmp_path, trusted=(ca,), leaf=ca.leaf("trainer"))
    with pytest.raises(UserError, match=f"^{keys.ENV_CONNECTION_AGE}: must be a number above 0"):
        surroundings({keys.ENV_TLS_DIR: str(tmp_path), keys.ENV_CONNECTION_AGE: age})


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
    assert set(ROLES) == methods


@pytest.mark.parametrize("uri", ["", "streamrl://a/b", "streamrl://a/b/c/d", "https://a/b/c", "streamrl:///b/c"])
def test_other_uris_name_nobody(uri: str) -> None:
    assert parse_identity(uri) is None


@pytest.mark.parametrize("role", ["scheduler", "trainer", "generator"])
def test_the_operators_leaves_are_taken(tmp_path: Path, role: Any) -> None:
    now, lives = datetime.now(UTC), Lives(ca_s=86_400, leaf_s=3600)
    ca = new_ca("job", now=now, lives=lives)
    leaf = new_leaf(Holder(namespace="team", job="job", role=role), ca=ca, now=now, lives=lives)
    for name, data in {"ca.crt": ca.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}.items():
        (tmp_path / name).write_bytes(data)
    tls = Tls(tmp_path)
    assert tls.identity == Identity(namespace="team", job="job", role=role)
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
        await await_model_place(environ, timeout_s=0)
    write_model_place(tmp_path / keys.FILE_MODEL, directory=Path("/store/model"))
    assert await await_model_place(environ, timeout_s=0) == model_place(environ) == "/store/model"
    assert model_place(environ | {keys.ENV_MODEL_PATH: "/given"}) == "/given"
    assert await await_model_place({}, timeout_s=0) is None
    (tmp_path / keys.FILE_MODEL).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        model_place(environ)
