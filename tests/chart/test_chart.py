"""Rules that every rendering of the chart keeps, whatever the values."""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import streamrl
from streamrl import names
from streamrl_cli.ui import command
from streamrl_operator.kube import kinds
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.objects.containers import rank_ports
from streamrl_operator.settings import OperatorSettings, from_environment
from support.chart import CHART, Helm, Objects
from support.jobs import parsed_job, with_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
APPLY = {"get", "list", "watch", "create", "patch", "delete"}


def _of(objects: Objects, kind: str, ending: str = "") -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(ending)]


def _pods(objects: Objects) -> Iterator[dict[str, Any]]:
    for one in objects:
        if one["kind"] == "Pod":
            yield one["spec"]
        elif one["kind"] in ("Deployment", "Job"):
            yield one["spec"]["template"]["spec"]


@pytest.fixture(params=CASES)
def rendered(objects: Callable[..., Objects], request: pytest.FixtureRequest) -> Objects:
    return objects("--values", str(HERE / f"values/{request.param}.yaml"))


def test_pods_are_restricted(rendered: Objects) -> None:
    for pod in _pods(rendered):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
    pages = len(_of(rendered, "ServiceAccount", "-ui"))
    assert len(list(_pods(rendered))) == 3 + pages  # operator, uninstall, test


def test_no_wildcards(rendered: Objects) -> None:
    rules = [rule for one in rendered for rule in one.get("rules", [])]
    assert rules
    for rule in rules:
        assert not any("*" in word for field in rule.values() for word in field), rule
        assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}, rule


def test_every_object_is_of_the_release(rendered: Objects) -> None:
    for one in rendered:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "streamrl", one
        assert labels["app.kubernetes.io/version"] == streamrl.__version__


def test_bindings_name_what_there_is(rendered: Objects) -> None:
    there = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered}
    bindings = [one for one in rendered if one["kind"].endswith("Binding")]
    assert bindings
    for one in bindings:
        kind = one["roleRef"]["kind"]
        namespace = one["metadata"].get("namespace") if kind == "Role" else None
        assert (kind, namespace, one["roleRef"]["name"]) in there
        for subject in one["subjects"]:
            assert ("ServiceAccount", subject["namespace"], subject["name"]) in there


def test_rules_cover_what_the_operator_applies(objects: Callable[..., Objects]) -> None:
    (role,) = _of(
        objects("--set", "kueue.enabled=true,gangs.enabled=true,clusters.enabled=true"), "ClusterRole", ":streamrl"
    )
    allowed: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                allowed.setdefault((group, resource), set()).update(rule["verbs"])
    for kind in kinds.APPLIED:
        group = kind.api_version.rpartition("/")[0]
        assert allowed.pop((group, kind.plural)) == APPLY, kind
    assert allowed == {
        ("streamrl.io", "rljobs"): {"list", "watch", "patch", "delete"},
        ("streamrl.io", "rljobdefaults"): {"get"},
        ("streamrl.io", "rljobs/status"): {"patch"},
        ("streamrl.io", "generatorpools/status"): {"patch"},
        ("streamrl.io", "rljobs/finalizers"): {"update"},
        ("streamrl.io", "generatorpools/finalizers"): {"update"},
        ("streamrl.io", "rlclusters"): {"list", "watch", "patch"},
        ("streamrl.io", "rlclusters/status"): {"patch"},
        ("multicluster.x-k8s.io", "clusterprofiles"): {"get"},
        ("", "namespaces"): {"get"},
        ("", "pods"): {"list", "watch", "create", "delete"},
        ("", "resourcequotas"): {"list"},
        ("events.k8s.io", "events"): {"create"},
        ("kueue.x-k8s.io", "workloads/status"): {"patch"},
        **{("kueue.x-k8s.io", each): {"get"} for each in ("resourceflavors", "workloadpriorityclasses")},
        ("scheduling.k8s.io", "priorityclasses"): {"get"},
    }


def test_nothing_of_kueue_is_granted_unless_it_is_asked_for(objects: Callable[..., Objects]) -> None:
    roles = [one for one in objects() if one["kind"] in ("Role", "ClusterRole")]
    assert not [rule for role in roles for rule in role["rules"] if "kueue.x-k8s.io" in rule["apiGroups"]]
    namespaced = objects("--set", "kueue.enabled=true,watchNamespaces={a}")
    (lookups,) = _of(namespaced, "ClusterRole", "-kueue")  # flavours have no namespace
    assert {verb for rule in lookups["rules"] for verb in rule["verbs"]} == {"get"}


def test_namespaces_confine(objects: Callable[..., Objects]) -> None:
    confined = objects("--set", "watchNamespaces={a,b},rbac.aggregate=false")
    assert not _of(confined, "ClusterRole")
    assert not _of(confined, "ClusterRoleBinding")
    roles = [one for one in _of(confined, "Role") if one["metadata"]["namespace"] != "streamrl-system"]
    assert sorted(one["metadata"]["namespace"] for one in roles) == ["a", "a", "b", "b"]  # operator and uninstall


def test_two_releases_do_not_collide(helm: Helm) -> None:
    """Of one name, in two namespaces, watching the same or all: no object is in both."""

    def keys(namespace: str, *arguments: str) -> set[tuple[str, str, str]]:
        chart = ("rl", str(CHART), "--namespace", namespace, "--kube-version", "1.34", "--set", "crds.install=false")
        text = helm("template", *chart, *arguments).stdout
        found = [one for one in YAML(typ="safe").load_all(text) if one]
        return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in found}

    for arguments in ((), ("--set", "watchNamespaces={a}")):
        assert not keys("one", *arguments) & keys("two", *arguments)


def test_crds_are_the_generated_ones(objects: Callable[..., Objects]) -> None:
    yaml = YAML(typ="safe")
    expected = {file.name: yaml.load(file.read_text()) for file in (ROOT / "crds").glob("*.yaml")}
    got = {
        f"streamrl.io_{one['spec']['names']['plural']}.yaml": one for one in _of(objects(), "CustomResourceDefinition")
    }
    assert set(got) == set(expected)
    for name, crd in got.items():
        assert crd["spec"] == expected[name]["spec"]
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert crd["metadata"]["name"] == expected[name]["metadata"]["name"]


def test_crd_switches(objects: Callable[..., Objects]) -> None:
    assert not _of(objects("--set", "crds.install=false"), "CustomResourceDefinition")
    for crd in _of(objects("--set", "crds.keep=false"), "CustomResourceDefinition"):
        assert "annotations" not in crd["metadata"]


def test_braces_in_a_crd_stay_text(objects: Callable[..., Objects], tmp_path: Path) -> None:
    chart = tmp_path / "streamrl"
    shutil.copytree(CHART, chart)
    file = chart / "files/crds/streamrl.io_generatorpools.yaml"
    file.write_text(file.read_text().replace("Name of the pool in the job.", '"{{ .Values.no.such }} and 0x10"', 1))
    (crd,) = _of(objects(chart=chart), "CustomResourceDefinition", "generatorpools.streamrl.io")
    assert "{{ .Values.no.such }} and 0x10" in json.dumps(crd)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("replica=2", "replica"),
        ("replicas=-1", "replicas"),
        ("replicas=two", "replicas"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("images.operator.digest=abc", "digest"),
        ("images.trainer.pullPolicy=Always", "pullPolicy"),
        ("uninstall.jobs=Forget", "jobs"),
        ("networkPolicy.apiServer.cidrs={everywhere}", "cidrs"),
        ("resources.limits.memory=lots", "memory"),
        ("crds.instal=true", "instal"),
        ("ui.names={a b}", "names"),
        ("jobDefaults.pods.image=a", "invalid propertyName 'pods'"),
        ("certificates.leafDays=0", "leafDays"),
        ("rdmaNamespaces={Team_A}", "rdmaNamespaces"),
        ("ui.resources.limits.memory=lots", "memory"),
    ],
)
def test_schema_refuses(helm: Helm, setting: str, complaint: str) -> None:
    done = helm("template", "streamrl", str(CHART), "--kube-version", "1.34", "--set", setting, check=False)
    assert done.returncode
    assert complaint in done.stderr
    assert "values don't meet the specifications of the schema" in done.stderr


def _settings(objects: Objects) -> OperatorSettings:
    """As the operator reads what the chart gives it."""
    (deployment,) = _of(objects, "Deployment", "streamrl")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given: dict[str, str] = {}
    for one in container["env"]:  # as the kubelet does it: $(NAME) of what stands before, and $$ is a dollar
        known = {"$$": "$"} | {f"$({name})": value for name, value in given.items()}
        value = one.get("value", "the operator's own")
        given[one["name"]] = re.sub(r"\$\$|\$\([^)]*\)", lambda found: known.get(found[0], found[0]), value)  # noqa: B023
    return from_environment(given)


def test_the_operator_reads_what_an_administrator_says(objects: Callable[..., Objects], tmp_path: Path) -> None:
    plain = _settings(objects())
    assert (plain.planning.job_defaults, plain.planning.rdma_namespaces) == ({}, ())
    assert (plain.planning.sets_user, plain.planning.isolates_jobs, plain.lives) == (True, True, Lives())
    env = [{"name": "A", "value": 'a "b" {{ c }} ü $(POD_NAME) $$ $'}]
    spec = {"pod": {"env": env, "resources": {"limits": {"cpu": 2}}}}
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"jobDefaults": spec, "rdmaNamespaces": ["b", "a", "b"]}))
    switches = "security.setUser=false,networkPolicy.jobs=false,certificates.caDays=90,certificates.leafDays=7"
    given = _settings(objects("--values", str(file), "--set", switches))
    assert (given.planning.job_defaults, given.planning.rdma_namespaces) == (spec, ("a", "b"))
    assert (given.planning.sets_user, given.planning.isolates_jobs) == (False, False)
    assert (given.lives.ca_s, given.lives.leaf_s) == (90 * 86_400, 7 * 86_400)


def test_users_are_the_cluster_s_where_it_chooses_them(objects: Callable[..., Objects]) -> None:
    found = objects(*PAGE, "--set", "security.setUser=false")
    assert len(list(_pods(found))) == 4
    for pod in _pods(found):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not any("runAsUser" in container["securityContext"] for container in pod["containers"])


def test_a_service_monitor_finds_the_operator_s_service(objects: Callable[..., Objects]) -> None:
    found = objects("--set", "metrics.serviceMonitor.enabled=true")
    (monitor,) = _of(found, "ServiceMonitor")
    (service,) = _of(found, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_crds_have_the_annotations_that_are_asked_for(objects: Callable[..., Objects]) -> None:
    asked = ("--set-string", r"crds.annotations.argocd\.argoproj\.io/sync-options=ServerSideApply=true")
    for keep, more in (("true", {"helm.sh/resource-policy": "keep"}), ("false", {})):
        crds = _of(objects(*asked, "--set", f"crds.keep={keep}"), "CustomResourceDefinition")
        assert len(crds) == 4
        for crd in crds:
            assert crd["metadata"]["annotations"] == {"argocd.argoproj.io/sync-options": "ServerSideApply=true"} | more


def test_the_hub_s_list_of_crds_is_whole(objects: Callable[..., Objects]) -> None:
    annotations = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())["annotations"]
    told = YAML(typ="safe").load(annotations["artifacthub.io/crds"])
    there = {
        (one["spec"]["names"]["kind"], one["metadata"]["name"]) for one in _of(objects(), "CustomResourceDefinition")
    }
    assert {(one["kind"], one["name"]) for one in told} == there


def test_account_without_name_is_refused(helm: Helm) -> None:
    done = helm(
        "template",
        "streamrl",
        str(CHART),
        "--kube-version",
        "1.34",
        "--set",
        "serviceAccount.create=false",
        check=False,
    )
    assert "serviceAccount.name is needed" in done.stderr


PAGE = ("--set", "ui.enabled=true,ui.tokenSecret=page")


def test_the_page_is_off_until_it_has_a_token(objects: Callable[..., Objects], helm: Helm) -> None:
    assert "ui" not in {one["metadata"]["labels"].get("app.kubernetes.io/component") for one in objects()}
    chart = ("streamrl", str(CHART), "--namespace", "rl", "--kube-version", "1.34", "--set", "ui.enabled=true")
    refused = helm("template", *chart, check=False)
    assert refused.returncode != 0
    assert "ui.tokenSecret: is required where ui.enabled is true; name a Secret of namespace rl" in refused.stderr


def test_the_page_reads_and_asks_schedulers_only_where_that_is_said(objects: Callable[..., Objects]) -> None:
    reads = [(["streamrl.io"], ["rljobs", "generatorpools"]), ([""], ["events"])]
    (role,) = _of(objects(*PAGE), "ClusterRole", ":ui")
    assert [(rule["apiGroups"], rule["resources"]) for rule in role["rules"]] == reads
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list"}
    (role,) = _of(objects(*PAGE, "--set", "ui.askSchedulers=true"), "ClusterRole", ":ui")
    assert role["rules"][2:] == [{"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}]
    confined = objects(*PAGE, "--set", "watchNamespaces={a,b,a},rbac.aggregate=false")
    assert not _of(confined, "ClusterRole")
    roles = [one for one in _of(confined, "Role") if "-ui-" in one["metadata"]["name"]]
    assert [one["metadata"]["namespace"] for one in roles] == ["a", "b"]


@pytest.mark.parametrize(("watched", "shown"), [("", None), ("a,b,a", ["a", "b"])])
def test_the_page_s_command_is_one(objects: Callable[..., Objects], watched: str, shown: list[str] | None) -> None:
    watching = ("--set", f"watchNamespaces={{{watched}}}") if watched else ()
    found = objects(*PAGE, *watching, "--set", "ui.names={rl.example.com}")
    (deployment,) = _of(found, "Deployment", "-ui")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "streamrl_cli.main", "ui", "--cluster"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--cluster", *container["args"]])
    command._check(args)
    assert (args.namespace, args.all_namespaces) == (shown, shown is None)
    assert args.name == ["streamrl-ui.streamrl-system.svc", "rl.example.com"]
    assert args.port == container["ports"][0]["containerPort"]
    (mount,) = container["volumeMounts"]
    assert str(args.token_file.parent) == mount["mountPath"]
    (volume,) = deployment["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"]["defaultMode"] & 0o007 == 0, "the command refuses a token that everybody can read"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind, ending in (("Service", "streamrl"), ("NetworkPolicy", "streamrl")):
        (operators,) = _of(found, kind, ending)
        (pages,) = _of(found, kind, "-ui")
        assert not _selector(operators).items() <= labels.items()
        assert _selector(pages).items() <= labels.items()


def _selector(one: dict[str, Any]) -> dict[str, str]:
    spec = one["spec"]
    return dict(spec["selector"] if "selector" in spec else spec["podSelector"]["matchLabels"])


def test_schema_knows_exactly_the_values() -> None:
    def keys(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> None:
        expected = set(schema["properties"]) - ({"global"} if not path else set())
        assert set(values) == expected, path
        assert schema["additionalProperties"] is False, path
        for key, value in values.items():
            if "properties" in schema["properties"][key]:
                keys(schema["properties"][key], value, f"{path}.{key}")

    keys(
        json.loads((CHART / "values.schema.json").read_text()),
        YAML(typ="safe").load((CHART / "values.yaml").read_text()),
    )


def test_versions_are_the_package_s() -> None:
    chart = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == streamrl.__version__


def test_disruption_budget_needs_two(objects: Callable[..., Objects]) -> None:
    assert not _of(objects(), "PodDisruptionBudget")
    (budget,) = _of(objects("--set", "replicas=2"), "PodDisruptionBudget")
    (deployment,) = _of(objects("--set", "replicas=2"), "Deployment")
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_selectors_do_not_take_in_hooks_or_jobs_pods(objects: Callable[..., Objects]) -> None:
    found = objects()
    (service,) = _of(found, "Service")
    (job,) = _of(found, "Job")
    (pod,) = _of(found, "Pod")
    for labels in (job["spec"]["template"]["metadata"]["labels"], pod["metadata"]["labels"]):
        assert not service["spec"]["selector"].items() <= labels.items()


def test_monitors_scrape_the_ports_that_pods_have(objects: Callable[..., Objects]) -> None:
    (monitor,) = _of(objects("--set", "metrics.podMonitor.enabled=true"), "PodMonitor", "-jobs")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (kept,) = (one["regex"] for one in endpoint["relabelings"] if one.get("action") == "keep")
    ports = {names.PORT_NAME_SIGNALS, names.PORT_NAME_TRAINER_SIGNALS, *rank_ports(with_ranks(parsed_job(), 3))}
    assert {name for name in (*ports, names.PORT_NAME_GRPC) if re.fullmatch(kept, name)} == ports
    assert len(ports) == 4
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression == {"key": names.LABEL_JOB, "operator": "Exists"}


def test_rules_name_the_operator_and_the_job(objects: Callable[..., Objects]) -> None:
    (rules,) = _of(objects("--set", "metrics.rules.enabled=true"), "PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    expressions = " ".join(alert["expr"] for alert in alerts)
    assert "OPERATOR_JOB" not in json.dumps(rules)
    assert 'job="streamrl-system/streamrl"' in expressions
    (jobs,) = (group["rules"] for group in rules["spec"]["groups"] if group["name"] == "streamrl-jobs")
    assert all("{{ $labels.rljob }}" in alert["annotations"]["summary"] for alert in jobs)


def test_lint(helm: Helm) -> None:
    for case in CASES:
        helm("lint", "--strict", str(CHART), "--values", str(HERE / f"values/{case}.yaml"))


def test_readme_is_fresh(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gen_chart", ROOT / "tools/gen_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.readme(CHART) == (CHART / "README.md").read_text()


def test_hooks_run_alone(objects: Callable[..., Objects]) -> None:
    """The script arrives as it is, and runs on Python as in any image: no package of ours, no third-party import."""
    script = (CHART / "files/hooks.py").read_text()
    (pod,) = _of(objects(), "Pod")
    assert pod["spec"]["containers"][0]["command"] == ["python", "-c", script, "check"]
    done = subprocess.run(
        ["python3", "-I", "-S", "-c", script, "neither"], capture_output=True, text=True, timeout=30, check=False
    )
    assert "KeyError: 'neither'" in done.stderr


def test_an_image_without_a_registry_is_refused(helm: Helm) -> None:
    """A stranger may take such a name on a public registry, and every cluster would run what is there."""
    chart = ("streamrl", str(CHART), "--kube-version", "1.34", "--set", "images.registry=")
    refused = helm("template", *chart, check=False)
    assert refused.returncode != 0
    assert "images.registry: is required for the image" in refused.stderr
    assert "--set images.registry=registry.example.com/rl" in refused.stderr
    own = [f"images.{role}.repository=registry.example.com/{role}" for role in ("operator", "trainer", "generator")]
    text = helm("template", *chart, "--set", ",".join(own)).stdout
    assert "image: registry.example.com/operator:" in text


def test_no_rendered_image_is_without_a_registry(rendered: Objects) -> None:
    images = [container["image"] for pod in _pods(rendered) for container in pod["containers"]]
    for pod in _pods(rendered):
        for container in pod["containers"]:
            images += [one["value"] for one in container.get("env", []) if one["name"].endswith("_IMAGE")]
    assert len(images) == 5 + len(_of(rendered, "ServiceAccount", "-ui"))
    assert [image for image in images if "." not in image.split("/")[0]] == []


@pytest.mark.parametrize("registry", ["streamrl", "rl/streamrl", "https://registry.example.com", "a b.c"])
def test_a_registry_that_is_none_is_refused(helm: Helm, registry: str) -> None:
    chart = ("streamrl", str(CHART), "--kube-version", "1.34", "--set", f"images.registry={registry}")
    assert "images.registry" in helm("template", *chart, check=False).stderr.replace(
        "/images/registry", "images.registry"
    )
