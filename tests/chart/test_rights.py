"""Every right that the charts grant stands in docs/reference/rights.md, with what it is for; and nothing else stands there."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.chart import MEMBER_CHART, Helm, Objects, runner
from support.rights_table import Right, documented

ALL = (
    "clusters.enabled=true",
    "kueue.enabled=true",
    "gangs.enabled=true",
    "numbers=Proxy",
    "ui.enabled=true",
    "ui.tokenSecret=page",
    "ui.askSchedulers=true",
    "uninstall.jobs=Delete",
)
WATCHED, RELEASE = "team-a", "streamrl-system"


def granted(objects: Objects) -> set[Right]:
    """What a rendering binds to accounts, and what it adds to the roles of people."""
    roles = {
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one
        for one in objects
        if "rules" in one
    }
    found: set[Right] = set()
    for one in objects:
        labels = one["metadata"].get("labels", {})
        for role in ("view", "edit", "admin"):
            if f"rbac.authorization.k8s.io/aggregate-to-{role}" in labels:
                found |= set(_rights(one, f"role {role}", "bound"))
        if one["kind"].endswith("Binding"):
            namespace = one["metadata"].get("namespace")
            role = roles[
                one["roleRef"]["kind"], namespace if one["roleRef"]["kind"] == "Role" else None, one["roleRef"]["name"]
            ]
            where = {WATCHED: "watched", RELEASE: "own", "kube-system": "kube-system", None: "cluster"}[namespace]
            for subject in one["subjects"]:
                found |= set(_rights(role, subject["name"], where))
    return found


def _rights(role: dict[str, Any], account: str, where: str) -> Iterator[Right]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    yield from (Right(account, where, group, resource, name, verb) for verb in rule["verbs"])


CONFINED = f"watchNamespaces={{{WATCHED}}}"
HOME = "streamrl-home"


def test_the_table_is_what_a_list_of_namespaces_grants(objects: Callable[..., Objects]) -> None:
    of_release = {one for one in documented() if one.account != HOME}
    with_all = granted(objects("--set", ",".join(ALL), "--set", CONFINED))
    of_all_namespaces = Right("streamrl-uninstall", "cluster", "streamrl.io", "rlclusters", "", "")
    assert with_all == {one for one in of_release if one[:4] != of_all_namespaces[:4]}
    plain = {one for one in documented(conditional=False) if one.account != HOME}
    assert granted(objects("--set", CONFINED)) == plain


def test_without_a_list_the_watched_namespaces_are_all(objects: Callable[..., Objects]) -> None:
    wanted = {one._replace(where="cluster") if one.where == "watched" else one for one in documented()}
    assert granted(objects("--set", ",".join(ALL))) == {one for one in wanted if one.account != HOME}


@pytest.mark.parametrize("trainers", [False, True])
def test_the_table_is_what_a_member_grants(helm: Helm, tmp_path: Path, trainers: bool) -> None:
    del helm  # which skips where there is none
    given = ("--set-json", f'namespaces=["{WATCHED}"]', "--set", f"trainers={json.dumps(trainers)}")
    chart = ("home", str(MEMBER_CHART), "--namespace", "streamrl-member", "--kube-version", "1.34")
    text = runner(tmp_path, registry="")("template", *chart, *given).stdout
    found = granted([one for one in YAML(typ="safe").load_all(text) if one])
    wanted = {one for one in documented(conditional=trainers) if one.account == HOME}
    assert {one._replace(where="member") if one.where == "watched" else one for one in found} == wanted


def test_no_right_leads_to_others() -> None:
    """Whoever has one of these may take rights that the table does not have."""
    verbs = {"*", "bind", "escalate", "impersonate"}
    kinds = {"pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token"}
    groups = {"rbac.authorization.k8s.io", "admissionregistration.k8s.io", "certificates.k8s.io"}
    assert not [one for one in documented() if one.verb in verbs or one.resource in kinds or one.group in groups]
