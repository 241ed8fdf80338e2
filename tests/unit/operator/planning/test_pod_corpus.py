"""Pods as people write them: each accepted snippet is seen in both kinds of pods, each other one gets one line."""

from typing import Any

import pytest

from streamrl.errors import UserErrors
from streamrl.names import OWN_CONTAINERS
from streamrl.spec import parse_job
from support.planned import planned, templates
from support.pod_corpus import ACCEPTED, REFUSED, Snippet, missing
from support.restricted import violations

OF_THE_MAIN_CONTAINER = ("resources", "lifecycle")
OF_OUR_CONTAINERS = ("image", "imagePullPolicy", "env", "envFrom", "volumeMounts")
OF_THE_METADATA = ("labels", "annotations")


def by_name(snippet: Snippet) -> str:
    return snippet.name


def test_there_are_enough() -> None:
    assert (len(ACCEPTED) >= 34, len(ACCEPTED) + len(REFUSED) >= 40) == (True, True)


def seen(pod: dict[str, Any], template: dict[str, Any]) -> list[str]:
    """What of the snippet is not in the planned pod."""
    spec = template["spec"]
    ours = [one for one in (*spec.get("initContainers", ()), *spec["containers"]) if one["name"] in OWN_CONTAINERS]
    faults: list[str] = []
    for key, value in pod.items():
        if key in OF_THE_METADATA:
            faults += missing(value, template["metadata"][key], key)
        elif key == "imagePullSecrets":
            faults += missing([{"name": name} for name in value], spec[key], key)
        elif key in OF_OUR_CONTAINERS or key in OF_THE_MAIN_CONTAINER:
            holders = spec["containers"][:1] if key in OF_THE_MAIN_CONTAINER else ours
            faults += [fault for one in holders for fault in missing(value, one.get(key), key)]
        else:
            faults += missing(value, spec.get(key), key)
    return faults


@pytest.mark.parametrize("snippet", ACCEPTED, ids=by_name)
def test_an_accepted_snippet_is_seen_in_the_pod(snippet: Snippet) -> None:
    found = dict(templates(planned(parse_job(snippet.job()))))
    assert len(found) == 2
    for template in found.values():
        assert seen(snippet.pod, template) == []
        allowed = ["hostNetwork is set"] if snippet.pod.get("hostNetwork") else []  # where the administrator says so
        assert violations(template["spec"]) == allowed


@pytest.mark.parametrize("snippet", REFUSED, ids=by_name)
def test_a_refused_snippet_gets_one_line_with_what_to_use(snippet: Snippet) -> None:
    with pytest.raises(UserErrors) as raised:
        parse_job(snippet.job())
    assert raised.value.lines == [
        f"spec.generators[0].pod.{snippet.refused}",
        f"spec.trainer.pod.{snippet.refused}",
    ]
    assert "; use " in snippet.refused or "for " in snippet.refused or "; write " in snippet.refused


def test_the_check_sees_what_is_not_there() -> None:
    pod = {"env": [{"name": "A", "value": "1"}], "volumes": [{"name": "v", "emptyDir": {"sizeLimit": 1}}]}
    template = {
        "spec": {
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "2"}]}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        }
    }
    assert seen(pod, template) == ["env[0].value", "volumes[0].emptyDir.sizeLimit"]
