"""What `streamrl submit` puts into the ConfigMap of a job's code, and what it refuses."""

import base64
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from streamrl.spec import RLJob, parse_job
from streamrl_cli.cluster.bundle import (
    as_written,
    bundle_problems,
    cluster_problems,
    collect,
    config_map,
    owned,
    with_code,
)
from streamrl_cli.jobfile import check_file
from streamrl_cli.local import job_problems
from support.tree import ROOT

FORMAT = "def shown(*, question, answer, metadata):\n    return {'prompt': question, 'target': answer}\n"
REWARD = "def good(*, prompt, completion, answer, metadata):\n    return 1.0\n"


def job_with(folder: Path, **task: object) -> RLJob:
    document = YAML(typ="safe", pure=True).load((ROOT / "tests/corpus/good/minimal.yaml").read_text())
    document["spec"]["task"] |= task
    del folder
    return parse_job(document)


def reward(function: str) -> list[dict]:
    return [{"name": "own", "python": {"function": function}}]


def mistakes(job: RLJob, folder: Path) -> list[str]:
    return [str(problem) for problem in bundle_problems(job, base_dir=folder)]


def test_a_job_without_own_code_needs_no_config_map(tmp_path: Path) -> None:
    assert not collect(job_with(tmp_path), base_dir=tmp_path).files


def test_modules_come_with_the_modules_beside_them_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "shape.py").write_text("import math\nfrom words import WORDS\n" + FORMAT)
    (tmp_path / "words.py").write_text("def late():\n    import deep\n")
    (tmp_path / "deep.py").write_text("import shape  # a circle is fine\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "unrelated.py").write_text("")
    job = job_with(tmp_path, format={"function": "shape:shown"}, rewards=reward("rewards:good"))
    assert mistakes(job, tmp_path) == []
    assert sorted(collect(job, base_dir=tmp_path).files) == ["deep.py", "rewards.py", "shape.py", "words.py"]


def test_a_data_file_of_a_folder_is_named_as_it_lies_in_the_config_map(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/questions.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    job = job_with(tmp_path, dataset={"jsonl": {"path": "data/questions.jsonl"}})
    bundle = collect(job, base_dir=tmp_path)
    document = with_code(as_written(job, namespace="ml"), job=job)
    assert document["spec"]["task"]["dataset"] == {"jsonl": {"path": "questions.jsonl"}}
    assert document["spec"]["task"]["code"] == {"configMapName": "minimal-code"}
    assert parse_job(document).spec.task.code is not None
    assert config_map(job, bundle, namespace="ml")["data"] == {"questions.jsonl": '{"prompt": "1+1=", "answer": "2"}\n'}


def mixed(folder: Path, **paths: str) -> RLJob:
    """A job with a task for each path."""
    document = YAML(typ="safe", pure=True).load((ROOT / "tests/corpus/good/minimal.yaml").read_text())
    own = {"rewards": reward("rewards:good"), "format": {"function": "shape:shown"}}
    tasks = [{"name": name, "dataset": {"jsonl": {"path": path}}, **own} for name, path in paths.items()]
    document["spec"]["task"] = {"mixture": tasks, "sampling": {"maxTokens": 8}}
    (folder / "rewards.py").write_text(REWARD)
    (folder / "shape.py").write_text(FORMAT)
    for path in paths.values():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return parse_job(document)


def test_the_files_of_all_tasks_of_a_mixture_come_along(tmp_path: Path) -> None:
    job = mixed(tmp_path, sums="data/sums.jsonl", words="words.jsonl")
    assert mistakes(job, tmp_path) == []
    assert sorted(collect(job, base_dir=tmp_path).files) == ["rewards.py", "shape.py", "sums.jsonl", "words.jsonl"]
    tasks = with_code(as_written(job, namespace="ml"), job=job)["spec"]["task"]["mixture"]
    assert [task["dataset"]["jsonl"]["path"] for task in tasks] == ["sums.jsonl", "words.jsonl"]


def test_two_files_of_a_mixture_with_one_name_are_refused(tmp_path: Path) -> None:
    (found,) = mistakes(mixed(tmp_path, a="a/rows.jsonl", b="b/rows.jsonl"), tmp_path)
    assert found.startswith("spec.task.mixture[1].dataset.jsonl.path: must have another name than a/rows.jsonl")


def test_bytes_that_are_no_text_are_kept_as_they_are(tmp_path: Path) -> None:
    data = b"PAR1\xff\x00"
    (tmp_path / "rows.parquet").write_bytes(data)
    job = job_with(tmp_path, dataset={"huggingFace": {"path": "rows.parquet"}})
    made = config_map(job, collect(job, base_dir=tmp_path), namespace="ml")
    assert base64.b64decode(made["binaryData"]["rows.parquet"]) == data


def test_the_config_map_goes_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    job = job_with(tmp_path, rewards=reward("rewards:good"))
    made = config_map(job, collect(job, base_dir=tmp_path), namespace="ml")
    stored = {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "minimal", "uid": "u-1"}}
    assert owned(made, stored)["metadata"]["ownerReferences"] == [
        {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "name": "minimal", "uid": "u-1"}
    ]
    assert "ownerReferences" not in made["metadata"]


def test_a_named_config_map_is_left_to_its_author(tmp_path: Path) -> None:
    job = job_with(tmp_path, rewards=reward("rewards:good"), code={"configMapName": "mine"})
    assert mistakes(job, tmp_path) == []
    assert not collect(job, base_dir=tmp_path).files


def test_more_than_a_mebibyte_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    line = '{"prompt": "1+1=", "answer": "2"}\n'
    (tmp_path / "big.jsonl").write_text(line * (1024 * 1024 // len(line) + 1))
    (found,) = mistakes(job_with(tmp_path, dataset={"jsonl": {"path": "big.jsonl"}}), tmp_path)
    assert "at most 1 MiB" in found
    assert "spec.trainer.pod.volumes" in found


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"rewards": reward("absent_module:good")}, "names a module that is not beside the job file"),
        ({"rewards": reward("package.part:good")}, "must be one file: a ConfigMap holds no packages"),
        ({"dataset": {"jsonl": {"path": "absent.jsonl"}}}, "spec.task.dataset.jsonl.path: must be a file"),
        ({"dataset": {"jsonl": {"path": "a b.jsonl"}}}, "must have a name of letters, digits, -, _ and ."),
        ({"dataset": {"huggingFace": {"path": "package"}}}, "must be a file: a ConfigMap holds no directories"),
    ],
)
def test_what_cannot_go_into_a_config_map_is_refused(task: dict, expected: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/part.py").write_text(REWARD)
    (tmp_path / "a b.jsonl").write_text("{}\n")
    (found,) = mistakes(job_with(tmp_path, **task), tmp_path)
    assert expected in found


def test_a_path_in_the_pod_is_left_alone(tmp_path: Path) -> None:
    job = job_with(tmp_path, dataset={"jsonl": {"path": "/data/questions.jsonl"}})
    assert mistakes(job, tmp_path) == []
    assert not collect(job, base_dir=tmp_path).files


def test_a_pool_for_the_frozen_model_needs_a_model_in_its_pods(tmp_path: Path) -> None:
    document = job_with(tmp_path).model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"] |= {
        "algorithm": {"grpo": {"referenceKl": {}}},
        "generators": [{"name": name, "engine": {"hf": {}}} for name in ("g", "f")],
        "trainer": {"reference": {"pool": "f"}},
    }
    assert mistakes(parse_job(document), tmp_path) == [
        "spec.trainer.reference: needs a frozen model with a path in the pods of its pool, got 'scratch'; "
        "put the model on a volume of the pool's pod, or leave trainer.reference out"
    ]
    document["spec"]["model"] = {"path": {"directory": "/models/policy"}}
    assert mistakes(parse_job(document), tmp_path) == []


def test_an_own_image_brings_its_modules(tmp_path: Path) -> None:
    document = as_written(job_with(tmp_path, rewards=reward("absent_module:good")), namespace="ml")
    document["spec"]["trainer"] = document["spec"].get("trainer", {}) | {"pod": {"image": "registry/own:1"}}
    assert mistakes(parse_job(document), tmp_path) == []


def test_what_was_written_is_what_is_applied_without_the_defaults() -> None:
    path = ROOT / "tests/corpus/good/everything.yaml"
    (job,), _ = check_file(path)
    written = YAML(typ="safe", pure=True).load(path.read_text())
    written["metadata"]["namespace"] = "ml"
    assert as_written(job, namespace="ml") == written


def test_checks_for_a_cluster_leave_this_machine_out(tmp_path: Path) -> None:
    document = as_written(job_with(tmp_path), namespace="ml")
    document["spec"]["model"] = {"path": {"directory": "/models/absent"}}
    assert job_problems(parse_job(document), base_dir=tmp_path) == []
    assert mistakes(parse_job(document), tmp_path) == []
    document["spec"]["model"] = {"path": {"directory": "absent"}}
    assert ["must be an absolute path in the pod" in found for found in mistakes(parse_job(document), tmp_path)] == [
        True
    ]


def test_a_plug_in_comes_by_the_jobs_own_image(tmp_path: Path) -> None:
    """A ConfigMap of code is no way around it: it is never imported beside certificates."""
    (tmp_path / "loss.py").write_text("class Mine: ...\n")
    document = YAML(typ="safe", pure=True).load((ROOT / "tests/corpus/good/minimal.yaml").read_text())

    def found(**spec: object) -> list[str]:
        job = parse_job(
            {**document, "spec": {**document["spec"], "algorithm": {"python": {"class": "loss:Mine"}}, **spec}}
        )
        return [str(problem) for problem in cluster_problems(job, base_dir=tmp_path)]

    refused = "spec.algorithm.python.class: must be installed in the image on a cluster: it runs beside the job's certificates, got 'loss:Mine'; put it into an own image (spec.trainer.pod.image)"
    assert found() == [refused]
    assert found(task={**document["spec"]["task"], "code": {"configMapName": "mine"}}) == [refused]
    assert found(trainer={**document["spec"].get("trainer", {}), "pod": {"image": "registry/mine:1"}}) == []
    assert found(algorithm={"python": {"class": "cispo"}}) == []
