"""Answers of an API server, as it words them, and the line that they become."""

import argparse
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.errors import UserErrors
from streamrl_cli.cluster.api import Call, ObjectNotFoundError, UnreachableError, connect, refusal
from streamrl_operator.kube.kinds import CONFIG_MAP, RLJOB

GET = Call(verb="get", kind=RLJOB, namespace="ml", context="prod", name="sum")


def status(message: str, *, reason: str = "", **details: object) -> str:
    return json.dumps({"kind": "Status", "message": message, "reason": reason, "details": details})


@pytest.mark.parametrize(
    ("code", "body", "line"),
    [
        (
            404,
            "404 page not found\n",
            "rljobs.streamrl.io: is not known to the cluster of context prod; install the operator there: "
            "helm install streamrl helm/streamrl --namespace streamrl-system --create-namespace --set images.registry=REGISTRY",
        ),
        (
            404,
            status('rljobs.streamrl.io "sum" not found', reason="NotFound", name="sum", kind="rljobs"),
            "rljobs.streamrl.io/sum: is not in namespace ml; `streamrl status` lists the jobs",
        ),
        (
            404,
            status('namespaces "ml" not found', reason="NotFound", name="ml", kind="namespaces"),
            "namespace ml: does not exist; make it: kubectl create namespace ml",
        ),
        (
            403,
            status('rljobs.streamrl.io "sum" is forbidden: User "eve" cannot get resource "rljobs" in API group'),
            "context prod: user eve may not get rljobs.streamrl.io in namespace ml; ask for a role with this verb",
        ),
        (
            403,
            status('rljobs.streamrl.io "sum" is forbidden: exceeded quota: jobs'),
            'rljobs.streamrl.io/sum: forbidden by the cluster: rljobs.streamrl.io "sum" is forbidden: exceeded quota: jobs',
        ),
        (
            401,
            status("Unauthorized"),
            "context prod: the API server does not know this user; log in again, or check the user of the context",
        ),
        (503, "upstream\nis away", "rljobs.streamrl.io/sum: the API server refused to get it (503): upstream is away"),
    ],
)
def test_a_refusal_is_one_line(code: int, body: str, line: str) -> None:
    assert str(refusal(GET, code=code, body=body.encode())) == line


def test_only_a_missing_object_is_not_found() -> None:
    missing = status('rljobs.streamrl.io "sum" not found', name="sum", kind="rljobs")
    assert isinstance(refusal(GET, code=404, body=missing.encode()), ObjectNotFoundError)
    assert not isinstance(refusal(GET, code=404, body=b"404 page not found"), ObjectNotFoundError)


@pytest.mark.parametrize(
    ("code", "is_unreachable"), [(401, False), (409, False), (429, True), (500, True), (503, True)]
)
def test_who_refuses_for_now_counts_as_unreachable(code: int, *, is_unreachable: bool) -> None:
    assert isinstance(refusal(GET, code=code, body=b"not now"), UnreachableError) is is_unreachable


def test_each_broken_rule_is_a_line_with_its_field() -> None:
    causes = [
        {
            "field": "spec.pipeline.steps",
            "message": "Invalid value: 0: must be at least 1",
            "reason": "FieldValueInvalid",
        },
        {"field": "spec", "message": "Invalid value: seed cannot be changed; make a new job"},
    ]
    error = refusal(GET, code=422, body=status("RLJob is invalid", causes=causes).encode())
    assert isinstance(error, UserErrors)
    assert [str(one) for one in error.errors] == [
        "spec.pipeline.steps: 0: must be at least 1",
        "spec: seed cannot be changed; make a new job",
    ]


def test_a_conflict_names_the_field_and_who_set_it() -> None:
    causes = [{"field": ".spec.suspend", "message": 'conflict with "kubectl-edit" using streamrl.io/v1alpha1'}]
    error = refusal(GET, code=409, body=status("Apply failed with 1 conflict", causes=causes).encode())
    assert str(error) == (
        "spec.suspend: was set by kubectl-edit since; write that value into the file, or take the file's with --force"
    )


def test_a_core_kind_has_no_group() -> None:
    call = Call(verb="patch", kind=CONFIG_MAP, namespace="ml", context="prod", name="code")
    body = status('configmaps "code" is forbidden: User "eve" cannot patch resource "configmaps"')
    assert str(refusal(call, code=403, body=body.encode())).startswith(
        "context prod: user eve may not patch configmaps in"
    )


@pytest.mark.parametrize("user", [{"token": "t"}, {}])
@pytest.mark.parametrize("is_far", [True, False])
async def test_a_far_server_is_reached_by_the_proxy_of_the_environment_and_netrc_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, str], is_far: bool
) -> None:
    told = []

    async def tell(request: web.Request) -> web.Response:
        told.append([request.host, *map(request.headers.get, ("Authorization", "Proxy-Authorization"))])
        metadata = {"name": "code", "namespace": "ml", "uid": "u", "resourceVersion": "1"}
        return web.json_response({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", tell)
    async with TestServer(application) as server:
        near = f"127.0.0.1:{server.port}"
        host = "api.invalid" if is_far else near
        (tmp_path / "netrc").write_text("default login me password secret")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("http_proxy", f"http://me:pass@{near}" if is_far else "http://127.0.0.1:1")
        config = {
            "current-context": "far",
            "contexts": [{"name": "far", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://{host}"}}],
            "users": [{"name": "u", "user": user}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        args = argparse.Namespace(kubeconfig=tmp_path / "config", context=None, namespace=None)
        async with connect(args) as client:
            await client.get(CONFIG_MAP, "code")
    assert told == [[host, "Bearer t" if user else None, "Basic bWU6cGFzcw==" if is_far else None]]
