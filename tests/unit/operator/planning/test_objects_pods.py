"""The pods: containers, environment, what a job may change of them and what it may not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl import keys, names
from streamrl.errors import UserErrors
from streamrl.spec import parse_job
from streamrl.spec.containers import EnvVar
from streamrl_operator.planning.objects.containers import merged_environment
from streamrl_operator.planning.values import DesiredRun
from support.jobs import simulated_job
from support.planned import SETTINGS, UID, containers, full_document, full_job, planned, templates
from support.restricted import violations


def of(template: dict[str, Any], name: str) -> dict[str, Any]:
    (container,) = (each for each in containers(template) if each["name"] == name)
    return container


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


def pod_of(name: str = "full-trainer", *, job: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(templates(planned(parse_job(job) if job else full_job())))[name]


def test_addresses_meet_ports() -> None:
    trainer, generator = environment(of(pod_of(), "trainer")), environment(of(pod_of("full-auto"), "generator"))
    scheduler = environment(of(pod_of(), "scheduler"))
    assert trainer[keys.ENV_SCHEDULER_ADDRESS] == f"localhost:{scheduler[keys.ENV_GRPC_PORT]}"
    assert generator[keys.ENV_SCHEDULER_ADDRESS] == f"full-scheduler:{scheduler[keys.ENV_GRPC_PORT]}"
    assert trainer[keys.ENV_WEIGHTS_ADDRESS] == f"full-scheduler:{trainer[keys.ENV_WEIGHTS_PORT]}"
    assert {scheduler[keys.ENV_SIGNALS_PORT], trainer[keys.ENV_SIGNALS_PORT]} == {"8080", "8081"}
    for container in (of(pod_of(), "scheduler"), of(pod_of(), "trainer"), of(pod_of("full-auto"), "generator")):
        listening = {str(port["containerPort"]) for port in container["ports"]}
        variables = environment(container)
        first = (keys.ENV_GRPC_PORT, keys.ENV_WEIGHTS_PORT, keys.ENV_SIGNALS_PORT)
        ports = (*first, keys.ENV_RANK_SIGNALS_PORT, keys.ENV_RANK_WEIGHTS_PORT)
        given_ports = {variables.get(key) for key in ports} - {None}
        assert listening == given_ports


@pytest.mark.parametrize(("url", "ways_out"), [("s3://bucket/weights", [{"protocol": "TCP"}]), ("/mnt/weights", None)])
def test_through_a_folder_generators_need_no_address_of_weights_but_a_way_to_the_store(
    url: str, ways_out: list[dict[str, Any]] | None
) -> None:
    document = full_document()
    document["spec"]["weights"] = {"folder": {"url": url}}
    built = planned(parse_job(document))
    pods = dict(templates(built))
    for pod, container in (("full-trainer", "trainer"), ("full-auto", "generator")):
        assert keys.ENV_WEIGHTS_ADDRESS not in environment(of(pods[pod], container))
    (policy,) = (one for one in built if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "full-auto"))
    anywhere = [rule["ports"] for rule in policy["spec"]["egress"] if rule.keys() == {"ports"}]
    assert (ways_out in anywhere) == (ways_out is not None)


def test_directories_of_the_environment_are_mounted() -> None:
    directories = (keys.ENV_RUN_DIR, keys.ENV_TLS_DIR, keys.ENV_SHARED_DIR, keys.ENV_STORE_DIR, keys.ENV_CODE_DIR)
    for _, template in templates(planned(full_job())):
        for container in containers(template):
            mounted = {mount["mountPath"].rstrip("/") for mount in container["volumeMounts"]}
            wanted = {environment(container).get(key) for key in directories} - {None}
            assert all(any(f"{path}/".startswith(f"{mount}/") for mount in mounted) for path in wanted)


def test_every_mount_has_a_volume_and_paths_differ() -> None:
    for _, template in templates(planned(full_job())):
        volumes = [volume["name"] for volume in template["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in containers(template):
            paths = [mount["mountPath"].rstrip("/") for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_each_container_comes_after_what_it_needs() -> None:
    assert [each["name"] for each in containers(pod_of())] == ["prepare", "tasks", "scheduler", "trainer"]
    assert [each.get("restartPolicy") for each in containers(pod_of())] == [None, "Always", "Always", None]


def test_code_of_the_user_sees_neither_keys_nor_journal_nor_checkpoints() -> None:
    mounts = of(pod_of(), "tasks")["volumeMounts"]
    store = names.store_dir("full", uid=UID)
    assert {mount["mountPath"] for mount in mounts} == {
        *(names.DIR_TASKS, names.DIR_CODE, "/tmp", "/data"),
        *(f"{store}/huggingface", f"{store}/models"),
    }
    assert all("subPath" in mount for mount in mounts if mount["name"] == "streamrl-store")


def test_what_code_of_the_user_writes_is_in_nobodys_home_but_its_own() -> None:
    """Python imports what lies where it starts: even on one volume of the job's for all of `/tmp`."""
    for _, template in templates(planned(full_job())):
        for container in containers(template):
            (home,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp")
            assert ("subPath" in home) == (container["name"] in ("prepare", "tasks"))


def test_the_tasks_have_an_image_and_resources_of_their_own_where_the_job_says_so() -> None:
    document = full_document()
    sizes = {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    document["spec"]["trainer"]["pod"] |= {"tasksImage": "verifiers:3", "tasksResources": sizes}
    template = pod_of(job=document)
    assert (of(template, "tasks")["image"], of(template, "tasks")["resources"]) == ("verifiers:3", sizes)
    assert of(template, "scheduler")["image"] == "registry.example/trainer:7"


def test_a_job_of_an_earlier_release_keeps_its_pods() -> None:
    """Its images know no host of tasks."""
    images = SETTINGS.images.model_copy(update={"tasks": None})
    wanted = DesiredRun(trainers=1, generators={}, images=images)
    template = dict(templates(planned(full_job(), wanted=wanted)))["full-trainer"]
    assert [each["name"] for each in containers(template)] == ["prepare", "scheduler", "trainer"]
    assert keys.ENV_TASKS_SOCKET not in environment(of(template, "scheduler"))
    assert not any("subPath" in mount for each in containers(template) for mount in each["volumeMounts"])


def test_a_simulated_job_prepares_no_model() -> None:
    template = pod_of("simulated-trainer", job=simulated_job())
    assert [each["name"] for each in containers(template)] == ["tasks", "scheduler", "trainer"]
    assert all(keys.ENV_SHARED_DIR not in environment(each) for each in containers(template))  # nobody waits for it


def test_each_role_sees_its_own_certificate_alone() -> None:
    seen = {}
    for _, template in templates(planned(full_job())):
        secrets = {v["name"]: v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
        for container in containers(template):
            mounted = [secrets[m["name"]] for m in container["volumeMounts"] if m["name"] in secrets]
            seen[container["name"]] = mounted
    assert seen == {
        "prepare": [],
        "tasks": [],
        "scheduler": ["full-tls-scheduler"],
        "trainer": ["full-tls-trainer"],
        "generator": ["full-tls-generator"],
    }


def of_nodes() -> dict[str, Any]:
    """The full job with a trainer of three nodes."""
    document = full_document()
    document["spec"]["trainer"]["nodes"] = 3
    return document


def test_a_further_node_has_ranks_and_nothing_else() -> None:
    template = pod_of("full-trainer-workers", job=of_nodes())
    assert [each["name"] for each in containers(template)] == [names.CONTAINER_PREPARE, names.CONTAINER_TRAINER]
    volumes = template["spec"]["volumes"]
    claims = [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]
    assert claims == ["full-checkpoints", "data"], "the journal is the scheduler's alone"
    assert [one["secret"]["secretName"] for one in volumes if "secret" in one] == ["full-tls-trainer"]
    given_ = environment(of(template, "trainer"))
    assert (given_[keys.ENV_MASTER_ADDR], given_[keys.ENV_MASTER_PORT]) == ("full-trainer-0.full-trainer", "50053")
    ordinal = {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
    assert given_[keys.ENV_NODE_ORDINAL] == {"fieldRef": ordinal}
    assert keys.ENV_SCHEDULER_ADDRESS not in given_
    assert {one["name"] for one in of(template, "trainer")["volumeMounts"]} <= {one["name"] for one in volumes}


def test_the_first_knows_its_own_address() -> None:
    first = environment(of(pod_of(job=of_nodes()), "trainer"))
    assert first[keys.ENV_MASTER_ADDR] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert keys.ENV_NODE_ORDINAL not in first
    assert keys.ENV_MASTER_ADDR not in environment(of(pod_of(), "trainer"))


def test_probes_kill_no_process_that_only_waits() -> None:
    for _, template in templates(planned(full_job())):
        for container in containers(template)[-2:]:
            if container["name"] == "prepare":
                continue
            assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
            ports = {port["containerPort"] for port in container["ports"]}
            assert container["readinessProbe"]["httpGet"]["port"] in ports
            if container["name"] == "scheduler":  # what comes after it waits until it is ready
                startup = container["startupProbe"]
                assert startup["httpGet"] == container["readinessProbe"]["httpGet"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
            else:
                assert "startupProbe" not in container


def test_liveness_is_the_heartbeat_file_where_no_other_pod_and_no_job_can_reach_it() -> None:
    files: dict[str, str] = {}
    for _, template in templates(planned(full_job())):
        scratch = {volume["name"] for volume in template["spec"]["volumes"] if "emptyDir" in volume}
        for container in containers(template):
            if container["name"] == "prepare":
                assert "livenessProbe" not in container, "Kubernetes refuses one of an init container"
                continue
            probe = container["livenessProbe"]
            *_, file, told_s = probe["exec"]["command"]
            assert file == environment(container)[keys.ENV_HEARTBEAT_FILE]
            (mount,) = (one for one in container["volumeMounts"] if file.startswith(f"{one['mountPath']}/"))
            assert mount["name"] in scratch
            assert mount["mountPath"].startswith("/var/lib/streamrl/"), "a job cannot mount a volume there"
            files[container["name"]] = file
            until_killed_s = float(told_s) + probe["periodSeconds"] * probe["failureThreshold"]
            assert (float(told_s), until_killed_s) == (30, 90)
            assert probe["terminationGracePeriodSeconds"] < template["spec"]["terminationGracePeriodSeconds"]
    assert len(set(files.values())) == len(files) == 4


@pytest.mark.parametrize(
    ("age_s", "code", "says"), [(None, 0, ""), (5, 0, ""), (29, 0, ""), (40, 1, "no sign of life for 40 s")]
)
def test_the_liveness_command_judges_the_age_of_the_file(
    *, age_s: float | None, code: int, says: str, tmp_path: Path
) -> None:
    _, *command = of(pod_of(), "scheduler")["livenessProbe"]["exec"]["command"]
    file = tmp_path / "heartbeat"
    if age_s is not None:
        file.touch()
        os.utime(file, (time.time() - age_s,) * 2)
    command[-2] = str(file)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (code, says)


def test_pools_and_trainer_do_not_select_each_others_pods() -> None:
    sets = [each["spec"] for each in planned(full_job()) if each["kind"] == "StatefulSet"]
    for one in sets:
        selector = one["selector"]["matchLabels"].items()
        assert [other for other in sets if selector <= other["template"]["metadata"]["labels"].items()] == [one]


def test_variables_of_ours_stay_even_where_the_contract_has_let_one_through() -> None:
    given = [EnvVar.model_construct(name=name, value="theirs", value_from=None) for name in (keys.ENV_RUN_DIR, "HOME")]
    built = merged_environment({keys.ENV_RUN_DIR: "ours", "HOME": "ours"}, given)
    assert built == [{"name": keys.ENV_RUN_DIR, "value": "ours"}, {"name": "HOME", "value": "theirs"}]


def test_relative_paths_are_those_of_the_code() -> None:
    document = full_document()
    assert environment(of(pod_of(), "scheduler"))[keys.ENV_CODE_DIR] == names.DIR_CODE
    del document["spec"]["task"]["code"]
    assert environment(of(pod_of(job=document), "scheduler"))[keys.ENV_CODE_DIR] == names.DIR_RUN


def test_the_check_of_restricted_sees_what_is_wrong() -> None:
    spec = {"volumes": [{"name": "h", "hostPath": {"path": "/"}}], "containers": [{"name": "c"}], "hostNetwork": True}
    assert violations(spec) == [
        "hostNetwork is set",
        "volume h: hostPath",
        "c: allowPrivilegeEscalation must be false",
        "c: runAsNonRoot must be true",
        "c: capabilities.drop must have ALL",
        "c: seccompProfile",
    ]


PROBE = {"httpGet": {"host": "169.254.169.254", "port": 80}}


@pytest.mark.parametrize(
    ("piece", "where"),
    [
        ({"readinessProbe": PROBE}, "readinessProbe.httpGet"),
        ({"livenessProbe": {"tcpSocket": {"host": "db", "port": 1}}}, "livenessProbe.tcpSocket"),
        ({"lifecycle": {"preStop": PROBE}}, "preStop.httpGet"),
    ],
)
def test_a_probe_asks_its_own_pod_alone(piece: dict[str, Any], where: str) -> None:
    """Since 1.34 Pod Security refuses a host in what the kubelet asks."""
    document = full_document()
    document["spec"]["trainer"]["pod"] = {"containers": [{"name": "a", "image": "i", **piece}]}
    with pytest.raises(UserErrors, match=rf"containers\[0\]: host of {where} must be absent"):
        parse_job(document)


WORDS = st.text("abcdefgh", min_size=1, max_size=6)
SOURCES = st.sampled_from(
    [
        {"emptyDir": {}},
        {"secret": {"secretName": "s"}},
        {"configMap": {"name": "c"}},
        {"emptyDir": {"medium": "Memory"}},
    ]
)
PATHS = st.sampled_from(["/tmp", "/data", "/dev/shm", "/var/lib/x", "/etc/ssl", "/home/x"])
LABELS = st.dictionaries(
    st.sampled_from([names.LABEL_NAME, names.LABEL_INSTANCE, names.LABEL_MANAGED_BY, "team"]), WORDS
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    volumes = draw(st.dictionaries(WORDS, SOURCES, max_size=4))
    mounts = draw(st.dictionaries(PATHS, st.sampled_from(sorted(volumes)), max_size=4)) if volumes else {}
    variables = draw(st.dictionaries(st.sampled_from(["HOME", "HF_HOME", "A", "PYTHONUNBUFFERED"]), WORDS, max_size=4))
    return {
        "labels": draw(LABELS),
        "annotations": draw(LABELS),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumes": [{"name": name, **source} for name, source in volumes.items()],
        "volumeMounts": [{"name": name, "mountPath": path} for path, name in mounts.items()],
        "resources": {"requests": draw(st.dictionaries(st.sampled_from(["cpu", "memory"]), st.just("1")))},
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pod=pods())
def test_no_change_of_a_job_touches_what_is_protected(pod: dict[str, Any]) -> None:
    document = full_document()
    document["spec"]["trainer"]["pod"] = document["spec"]["generators"][0]["pod"] = {}
    plain = dict(templates(planned(parse_job(document))))
    document["spec"]["trainer"]["pod"] = document["spec"]["generators"][0]["pod"] = pod
    for name, template in templates(planned(parse_job(document))):
        assert violations(template["spec"]) == []
        for key in ("securityContext", "serviceAccountName", "automountServiceAccountToken"):
            assert template["spec"][key] == plain[name]["spec"][key]
        assert plain[name]["metadata"]["labels"].items() <= template["metadata"]["labels"].items()
        for mine, theirs in zip(containers(plain[name]), containers(template), strict=True):
            assert protected(mine) == protected(theirs)


def protected(container: dict[str, Any]) -> dict[str, Any]:
    """What a job cannot change of a container."""
    kept = {key: value for key, value in container.items() if key not in ("env", "volumeMounts", "resources")}
    kept["env"] = {k: v for k, v in environment(container).items() if k.startswith("STREAMRL_")}
    kept["mounts"] = [mount for mount in container["volumeMounts"] if "/streamrl/" in mount["mountPath"]]
    return kept


def test_generators_with_vllm_share_memory() -> None:
    job = full_document()
    for pool in job["spec"]["generators"]:
        pool["engine"] = {"vllm": {}}
    job["spec"]["trainer"]["engine"] = {"torch": {}}
    job["spec"]["task"]["sampling"].pop("topK", None)
    job["spec"]["task"]["sampling"].pop("topP", None)
    template = pod_of("full-auto", job=job)
    assert {"name": "streamrl-shm", "mountPath": "/dev/shm"} in of(template, "generator")["volumeMounts"]
    assert {"name": "streamrl-shm", "emptyDir": {"medium": "Memory"}} in template["spec"]["volumes"]


_CLAIM = {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}


@pytest.mark.parametrize(
    ("path", "mounts", "space"),
    [
        ("/cache/weights", [{"name": "weights", "mountPath": "/cache"}], False),
        ("/cache", [{"name": "weights", "mountPath": "/cache"}], False),
        ("/tmp/weights", [], False),
        ("/cache", [{"name": "weights", "mountPath": "/cached"}], True),
        ("/cache", [{"name": "weights", "mountPath": "/cache/elsewhere"}], True),
    ],
)
def test_a_weight_cache_is_on_a_volume_of_the_job_or_on_the_nodes_space(
    path: str, mounts: list[dict[str, Any]], space: bool
) -> None:
    job = full_document()
    pool = next(each for each in job["spec"]["generators"] if each["name"] == "auto")
    pool |= {"weightCache": {"path": path, "maxBytes": "1Gi"}, "pod": {"volumes": [_CLAIM], "volumeMounts": mounts}}
    template = pod_of("full-auto", job=job)
    assert ({"name": "streamrl-cache", "mountPath": path} in of(template, "generator")["volumeMounts"]) == space
    assert ({"name": "streamrl-cache", "emptyDir": {}} in template["spec"]["volumes"]) == space
    assert violations(template["spec"]) == []


def test_the_pool_of_the_frozen_model_has_pods_like_any_other() -> None:
    plain, frozen = full_document(), full_document()
    for document in (plain, frozen):
        document["spec"]["algorithm"] = {"grpo": {"referenceKl": {}}}
    frozen["spec"]["trainer"]["reference"] = {"pool": "fixed"}
    assert list(templates(planned(parse_job(plain)))) == list(templates(planned(parse_job(frozen))))
