"""The chart `streamrl-member`: what it lets a home cluster do in a member."""

import json
from collections.abc import Callable

import pytest
from ruamel.yaml import YAML

from streamrl_operator.kube.kinds import IN_MEMBERS
from support.chart import MEMBER_CHART, Helm, Objects, runner


@pytest.fixture
def rendered(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Objects]:
    """Its objects, for these namespaces."""
    del helm  # which skips where there is none
    run = runner(tmp_path_factory.mktemp("helm"), registry="")

    def render(*namespaces: str, **values: str) -> Objects:
        given = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        where = ("--namespace", "streamrl-member", "--kube-version", "1.34")
        text = run(
            "template", "home", str(MEMBER_CHART), *where, "--set-json", f"namespaces={json.dumps(namespaces)}", *given
        )
        return [one for one in YAML(typ="safe").load_all(text.stdout) if one]

    return render


def test_rights_are_in_the_given_namespaces_and_say_which_cluster_it_is(rendered: Callable[..., Objects]) -> None:
    found = rendered("a", "b")
    kinds = {one["kind"] for one in found}
    assert kinds == {"ServiceAccount", "Secret", "Role", "RoleBinding"}
    roles = {one["metadata"]["namespace"]: one["rules"] for one in found if one["kind"] == "Role"}
    assert roles.keys() == {"a", "b", "kube-system"}
    assert roles["kube-system"] == [
        {"apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"], "verbs": ["get"]}
    ]
    granted = {resource: rule["verbs"] for rule in roles["a"] for resource in rule["resources"]}
    assert granted.keys() == {kind.plural for kind in IN_MEMBERS} | {"pods"}
    assert granted["pods"] == ["list", "watch", "delete"]
    assert not any("*" in verbs or "escalate" in verbs for verbs in granted.values())


def test_volumes_and_the_proxy_are_granted_only_where_trainers_may_be(rendered: Callable[..., Objects]) -> None:
    roles = {
        wanted: next(one["rules"] for one in rendered("a", trainers=wanted) if one["kind"] == "Role")
        for wanted in ("false", "true")
    }
    assert [rule for rule in roles["true"] if rule not in roles["false"]] == [
        {
            "apiGroups": [""],
            "resources": ["persistentvolumeclaims"],
            "verbs": ["get", "list", "watch", "create", "patch", "delete"],
        },
        {"apiGroups": [""], "resources": ["services/proxy"], "verbs": ["get"]},
    ]


def test_a_token_is_made_only_where_it_is_wanted(rendered: Callable[..., Objects]) -> None:
    assert not [one for one in rendered("a", **{"serviceAccount.token": "false"}) if one["kind"] == "Secret"]
