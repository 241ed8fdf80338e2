"""Least privilege: what the operator's ServiceAccount used, by the API server's audit log, is what the chart grants. Both ways."""

import pytest

from cluster.harness.audit import Use
from e2e.jobs import simulated
from e2e.release import NAMESPACE, Release, kill_container
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

Right = tuple[str, str, str]
"""(API group, resource with its subresource, verb)."""
INSIDE_ADMISSION: set[Right] = {
    ("streamrl.io", "rljobs/finalizers", "update"),
    ("streamrl.io", "generatorpools/finalizers", "update"),
}
"""Never requests: an admission plug-in (OwnerReferencesPermissionEnforcement) asks for them where a cluster has it on."""
MADE = {
    ("", "configmaps"),
    ("", "persistentvolumeclaims"),
    ("", "secrets"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("apps", "statefulsets"),
    ("networking.k8s.io", "networkpolicies"),
    ("policy", "poddisruptionbudgets"),
    ("streamrl.io", "generatorpools"),
}
WHERE_A_NAME_IS_TAKEN: set[Right] = {(*kind, "get") for kind in MADE}
"""What the operator makes it reads only where the API server says that there is one of that name (tests/cluster/test_operator.py)."""
REPLACE = {"name": "replace", "role": "Generator", "onReasons": ["Error"], "action": "ReplacePodAndIgnoreMaxRestarts"}


def test_every_right_is_used_and_no_other_is_needed(release: Release, stage: Stage) -> None:
    live_through_everything(release, stage)
    uses = release.cluster.uses(release.account)
    refused = {right(use) for use in uses if use.code == 403}
    used = {each for use in uses if use.code != 403 and use.resource[:1] != "/" for each in needed(use)}
    granted = rights(release)
    assert not refused, f"asked for and not granted: {sorted(refused)}"
    assert used <= granted, f"used by some other grant: {sorted(used - granted)}"
    unused = granted - used - WHERE_A_NAME_IS_TAKEN
    assert unused == INSIDE_ADMISSION, f"granted, never used: {sorted(unused - INSIDE_ADMISSION)}"


def test_no_rule_has_a_wildcard(release: Release) -> None:
    assert not [one for one in rights(release) if "*" in "".join(one)]


def live_through_everything(release: Release, stage: Stage) -> None:
    """One job that needs each of the operator's verbs: made, healed, edited, suspended, ended by itself, deleted with its volumes."""
    job = simulated("all", steps=40, step_s=0.5)
    spec = job["spec"]
    spec["failurePolicy"] = {"maxRestarts": 3, "rules": [REPLACE]}
    spec["trainer"]["disruption"] = "Block"
    spec["storage"]["checkpoints"]["whenDeleted"] = "Delete"
    stage.apply(job)
    stage.wait_step("all", 2)
    generator = f"{names.pool('all', 'sim')}-0"
    kill_container(release.cluster, stage.pods("all")[generator], names.CONTAINER_GENERATOR)
    stage.wait_for(lambda: stage.status("all").get("ignoredRestarts"), "the generator's pod to be replaced", job="all")
    stage.change("all", suspend=True)
    stage.wait_for(lambda: not stage.pods("all"), "no pods", job="all")
    stage.change("all", suspend=False)
    stage.wait_succeeded("all")
    stage.assert_exact("all")
    stage.change("all", ttlSecondsAfterFinished=0)
    stage.wait_for(lambda: stage.get("rljobs", "all") is None, "the job to be deleted", job="all", ended=True)
    release.kill()  # a second life: it takes the Lease over


def right(use: Use) -> Right:
    return use.group, use.resource, use.verb


def needed(use: Use) -> set[Right]:
    """An apply that makes the object is asked for `create` too; the audit log has the one verb, and 201."""
    return {right(use), (use.group, use.resource, "create")} if (use.verb, use.code) == ("patch", 201) else {right(use)}


def rights(release: Release) -> set[Right]:
    """What is granted to the operator's ServiceAccount, as the API server has it: by the chart, and not by what every account has."""
    account = release.pod()["spec"]["serviceAccountName"]
    objects, found = release.cluster.the_node.objects, set()
    group = "/apis/rbac.authorization.k8s.io/v1"
    for binding in (*objects.list(f"{group}/clusterrolebindings"), *objects.list(f"{group}/rolebindings")):
        subjects = [(one["kind"], one.get("namespace"), one["name"]) for one in binding.get("subjects", ())]
        if ("ServiceAccount", NAMESPACE, account) not in subjects:
            continue
        reference = binding["roleRef"]
        home = (
            f"{group}/clusterroles"
            if reference["kind"] == "ClusterRole"
            else f"{group}/namespaces/{binding['metadata']['namespace']}/roles"
        )
        role = objects.get(f"{home}/{reference['name']}")
        assert role is not None
        for rule in role["rules"]:
            found |= {
                (api, resource, verb)
                for api in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return found
