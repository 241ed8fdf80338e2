"""`streamrl plan --optimize`: the sizes that a profile says are best, filled into the objects, and why."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from support.command import streamrl
from support.plans import SLOTS, PlanFiles, job, pool_profile, profile


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanFiles:
    return PlanFiles(tmp_path, capsys)


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        (("--devices", "6"), (4, 2)),  # 8/4 = 4/2 = 2 s
        (("--devices", "3"), (2, 1)),
        (("--generator-devices", "8", "--trainer-devices", "2"), (4, 2)),  # eight could generate in 1 s
        (("--generator-devices", "2", "--trainer-devices", "4"), (2, 1)),
    ],
)
def test_the_sizes_that_match_both_stages_are_filled_in(
    files: PlanFiles, devices: tuple[str, ...], chosen: tuple[int, int]
) -> None:
    assert files.chosen(*devices) == chosen


def test_why_shows_the_choice_beside_its_neighbours_with_times_and_costs(files: PlanFiles) -> None:
    done = files.optimise("--devices", "6")
    assert (done.code, done.err) == (0, [])
    assert done.out[0].startswith("simulated: ")
    text = done.out[done.out.index("WHY 4 generators in pool sim and 2 trainer processes") :]
    rows = [line.split() for line in text[2:9]]
    assert [" ".join(row[:2]) for row in rows] == ["3 2", "3 3", "4 1", "4 2", "4 3", "5 1", "5 2"]
    assert " ".join(text[5].split()) == "4 2 2 s 2 s 2 s 8.00 0.06944 <- chosen"  # 8 an hour, 2 s, 64 samples a step
    assert text[6].endswith("more devices than there are")
    assert text[9].strip().startswith("the stages are balanced: generation 2 s, training 2 s")
    assert text[10].strip().endswith("6 of 6 devices")
    assert text[-1] == (
        f"to use it: streamrl submit {files.job} --set 'spec.generators[0].scaling.static.replicas=4' "
        "--set spec.trainer.processesPerNode=2 --set 'spec.trainer.costPerHour=\"4.00\"'"
    )
    assert "trainer: 2 ranks" in "\n".join(done.out)
    assert done.out[-1] == text[-1]


def test_the_flags_that_it_names_give_the_same_objects(files: PlanFiles) -> None:
    chosen = files.optimise("--devices", "6", "-o", "json").out
    named = files.plan(
        "-o", "json", "--set", "spec.generators[0].scaling.static.replicas=4",
        "--set", "spec.trainer.processesPerNode=2", "--set", 'spec.trainer.costPerHour="4.00"',
    ).out  # fmt: skip
    assert chosen == named


def test_where_the_longest_answer_bounds_it_no_generator_is_added(files: PlanFiles) -> None:
    files.write(job(), profile(pools=[pool_profile(tokens=(10,) * 62 + (1000, 1000))], training={1: 1.0}))
    done = files.optimise("--devices", "20")
    text = "\n".join(done.out)
    assert "WHY 1 generator in pool sim and 1 trainer process\n" in text
    assert "the longest answer alone takes 10 s, so more generators would not help" in text


def test_training_beyond_what_was_measured_is_said(files: PlanFiles) -> None:
    files.write(job(), profile(training={1: 8.0}))
    done = files.optimise("--devices", "6")
    line = f"numbers of processes that training was measured with: 1; 3 is extrapolated (streamrl profile {files.job} --trainer --processes 1,3)"
    assert f"  {line}" in done.out


def test_longer_answers_shift_devices(files: PlanFiles) -> None:
    measured = profile(training={1: 4.0, 2: 3.5, 4: 3.4})
    points = measured["trainer"]["points"]
    points += [point | {"tokens": 3200} for point in points]  # training takes as long for half of the tokens
    files.write(job(), measured)
    assert files.chosen("--devices", "8", "--length-factor", "0.5")[0] < files.chosen("--devices", "8")[0]


def test_bounds_of_an_elastic_pool_are_kept(files: PlanFiles) -> None:
    scaling = {"auto": {"initialReplicas": 2, "minReplicas": 2, "maxReplicas": 3}}
    files.write(job(scaling=scaling), profile())
    assert files.chosen("--devices", "10")[0] == 3
    flags = files.optimise("--devices", "10").out[-1]
    assert "--set 'spec.generators[0].scaling.auto.initialReplicas=3'" in flags


def test_a_replica_takes_as_many_devices_as_its_pod_has_gpus(files: PlanFiles) -> None:
    pod = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    document = job(pod=pod)
    document["spec"]["trainer"]["pod"] = {"resources": {"limits": {"nvidia.com/gpu": "1", "memory": "8Gi"}}}
    files.write(document, profile())
    done = files.optimise("--devices", "10", "-o", "yaml")
    warned = [line for line in done.err if line.startswith("warning: ")]
    assert warned[1].endswith("name 2 of nvidia.com/gpu, and engine hf takes 1; lower it to 1")
    assert done.err[len(warned)] == "WHY 4 generators in pool sim and 2 trainer processes"
    objects = list(YAML(typ="safe", pure=True).load_all("\n".join(done.out)))
    sets = {one["metadata"]["name"]: one for one in objects if one["kind"] == "StatefulSet"}
    trainer = sets["simulated-trainer"]
    limits = trainer["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2", "memory": "8Gi"}


@pytest.mark.parametrize("gpus", [{}, {"nvidia.com/gpu": "2"}])
def test_a_replica_takes_as_many_devices_as_share_its_model(files: PlanFiles, gpus: dict[str, str]) -> None:
    """Four devices generate with two replicas: 4 s, as one process trains; the cost is that of the replica."""
    engine = {"vllm": {"tensorParallelSize": 2, "maxConcurrency": SLOTS}}
    measured = profile(pools=[pool_profile() | {"engine": "vllm", "devices": 2}])
    files.write(job(engine=engine, pod={"resources": {"limits": gpus}}), measured)
    assert files.chosen("--devices", "5") == (2, 1)
    text = "\n".join(files.optimise("--devices", "5").out)
    assert "5 of 5 devices" in text
    row = next(line.split() for line in text.splitlines() if line.endswith("<- chosen"))
    assert row[:2] == ["2", "1"] and "4.00" in row, "two replicas of 1.00 and a trainer of 2.00"
    assert files.optimise("--devices", "2").err == ["devices: must be at least 3 for one of each stage, got 2"]


def test_a_pool_that_was_measured_on_other_devices_was_not_measured(files: PlanFiles) -> None:
    engine = {"vllm": {"tensorParallelSize": 4, "maxConcurrency": SLOTS}}
    files.write(job(engine=engine), profile(pools=[pool_profile() | {"engine": "vllm", "devices": 2}]))
    line = f"--profile: has nothing of pool sim with engine vllm on 4 devices; {MEASURE.format(job=files.job)}"
    assert files.optimise("--devices", "8").err == [line]


def test_other_pools_keep_their_sizes_and_take_their_part(files: PlanFiles) -> None:
    document = job()
    other = document["spec"]["generators"][0] | {"name": "other", "scaling": {"static": {"replicas": 2}}}
    document["spec"]["generators"].append(other)
    files.write(document, profile(pools=[pool_profile(), pool_profile("other")]))
    # Two and two generate: 2 s, as two processes train.
    assert files.chosen("--pool", "sim", "--devices", "4") == (2, 2)
    line = files.optimise("--devices", "4").err
    assert line == ["--pool: must name one of sim, other; the others keep their sizes"]


def test_memory_of_a_device_asks_for_more_processes(files: PlanFiles) -> None:
    document = job()
    document["spec"]["model"] = {"scratch": {"hiddenSize": 4096, "layers": 32, "heads": 32, "intermediateSize": 11008}}
    document["spec"]["trainer"] |= {"microBatchTokens": 1024, "activationCheckpointing": True}
    measured = profile(training={1: 0.4, 4: 0.1})
    measured["model"] = {"scratch": document["spec"]["model"]["scratch"] | {"maxPositions": 512}}
    files.write(document, measured)
    assert files.chosen("--devices", "40")[1] == 1
    processes = files.chosen("--devices", "40", "--device-memory", "80Gi")[1]
    assert 2 <= processes <= 12
    refused = files.optimise("--devices", "40", "--device-memory", "1Gi")
    assert refused.err == [
        "--device-memory: must hold a part of the trainer; 64 processes do not fit either, got '1Gi'"
    ]


MEASURE = "measure one: streamrl profile {job}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--optimize", "--devices", "4"), f"--optimize: needs a profile of the job; {MEASURE}, then give --profile profile.json"),
        (("--profile", "{profile}"), "--profile: is used with --optimize; add --optimize"),
        (("--optimize", "--profile", "{profile}"), "--optimize: needs the devices that there are; give --devices N, or --generator-devices M and --trainer-devices N where they are of two kinds"),
        (("--optimize", "--profile", "{profile}", "--generator-devices", "4"), "--optimize: needs the devices that there are; give --devices N, or --generator-devices M and --trainer-devices N where they are of two kinds"),
        (("--optimize", "--profile", "{profile}", "--devices", "1"), "devices: must be at least 2 for one of each stage, got 1"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--pool", "x"), "--pool: must be one of sim, got 'x'"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--length-factor", "0"), "--length-factor: must be above 0, got 0.0"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--device-memory", "much"), "--device-memory: must be a byte quantity such as 80Gi, got 'much'"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--set", "spec.pipeline.mode=Colocated"), "--optimize: balances stages that work at the same time; with mode Colocated they take turns; set spec.pipeline.mode to StreamAsync or StreamSync"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--set", "spec.generators=[{{name: sim, engine: {{hf: {{}}}}}}, {{name: lent, engine: {{hf: {{}}}}, devices: Trainer}}]"), "--optimize: balances stages that work at the same time; on the trainer's devices is lent; leave out generators[].devices"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--set", "spec.generators[0].name=gpu"), f"--profile: has nothing of pool gpu with engine hf; {MEASURE}"),
        (("--optimize", "--profile", "{profile}", "--devices", "4", "--set", "spec.model.scratch.layers=9"), f"--profile: was measured with another model, for job simulated, got '{{profile}}'; {MEASURE}"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line(files: PlanFiles, arguments: tuple[str, ...], line: str) -> None:
    places = {"job": str(files.job), "profile": str(files.profile)}
    done = files.plan(*(argument.format(**places) for argument in arguments))
    assert (done.code, done.out, done.err) == (2, [], [line.format(**places)])


def test_a_job_without_generators_has_nothing_to_balance(files: PlanFiles, capsys: pytest.CaptureFixture[str]) -> None:
    document = job(mode="StreamSync")
    document["spec"]["generators"] = []
    document["spec"]["algorithm"] = {"supervised": {}}
    document["spec"]["task"]["groupSize"] = 1
    document["spec"]["task"].pop("rewards")
    files.write(document, profile())
    line = "--optimize: balances generators with the trainer; the job has no generators"
    assert files.optimise("--devices", "4").err == [line]
    assert files.optimise("--pool-devices", "x=2", "--trainer-devices", "2").err == [line]
    measured = streamrl(capsys, "profile", str(files.job), "--pool", "x")
    assert measured.err == ["--pool: must be absent: the job has no generators, got 'x'"]


def test_a_pool_for_the_frozen_model_is_not_balanced(files: PlanFiles) -> None:
    document = job()
    document["spec"]["algorithm"] = {"grpo": {"referenceKl": {}}}
    document["spec"]["generators"].append({"name": "frozen", "engine": {"hf": {}}})
    document["spec"].setdefault("trainer", {})["reference"] = {"pool": "frozen"}
    document["spec"]["model"] = {"path": {"directory": "/models/policy"}}
    files.write(document, profile())
    assert files.optimise("--devices", "4").err == [
        "spec.trainer.reference: must be absent with --optimize: what its pool takes was not measured, got 'frozen'"
    ]


def test_a_broken_profile_is_told_line_by_line(files: PlanFiles) -> None:
    files.write(job(), profile(version=9))
    done = files.optimise("--devices", "4")
    assert (done.code, len(done.err)) == (2, 1)
    assert "version: must be 1" in done.err[0]
    assert "streamrl profile" in done.err[0]


def test_several_jobs_in_a_file_are_refused(files: PlanFiles) -> None:
    files.job.write_text(f"{json.dumps(job())}\n---\n{json.dumps(job())}\n")
    done = files.optimise("--devices", "4")
    assert done.err == [f"--optimize: needs a file with one job, {files.job} holds 2"]
