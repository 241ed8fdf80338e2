"""Pods as people write them, at a real API server: the job is stored, and its StatefulSets are taken and kept as planned."""

import pytest

from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from streamrl.spec import parse_job
from streamrl_operator.planning.compare import differs
from support.planned import planned
from support.pod_corpus import ACCEPTED, REFUSED, Snippet


def by_name(snippet: Snippet) -> str:
    return snippet.name


@pytest.mark.parametrize("snippet", ACCEPTED, ids=by_name)
def test_an_accepted_snippet_becomes_pods(control_plane: Cluster, namespace: str, snippet: Snippet) -> None:
    """What the API server gives back means the same to us, and asks for no second write."""
    api = control_plane.api
    stored = api.create(f"{GROUP}/namespaces/{namespace}/rljobs", snippet.job()).expect()
    plain = {key: stored[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": snippet.name}}
    job = parse_job(plain)
    assert job.spec == parse_job(snippet.job()).spec
    sets = [each for each in planned(job) if each["kind"] == "StatefulSet"]
    assert len(sets) == 2
    for wanted in sets:
        own = wanted | {"metadata": wanted["metadata"] | {"namespace": namespace}}
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        made = api.create(path, own, dryRun="All").expect()
        assert not differs(own, made)


@pytest.mark.parametrize("snippet", REFUSED, ids=by_name)
def test_a_refused_snippet_is_not_stored(control_plane: Cluster, namespace: str, snippet: Snippet) -> None:
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    answer = control_plane.api.create(path, snippet.job(), dryRun="All")
    field = snippet.refused.split(": ")[0].rpartition(".")[2]
    assert (answer.code in (400, 422), field in answer.message) == (True, True), answer.message
