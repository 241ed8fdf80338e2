"""What the specification takes, what it refuses, and in which words."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError, UserErrors, shorten
from streamrl.spec import RLJob, parse_bytes, parse_job
from streamrl.spec.parse import PEERS_NAMES, suggest
from streamrl.spec.schema import allowed, job_schema, path_text, plain_schema, schema_at, type_name, unit
from streamrl.spec.training import Pipeline
from streamrl.status import RLJobStatus


def document(**spec: object) -> dict[str, Any]:
    """A job with as little as possible, and `spec` over it."""
    task = {
        "dataset": {"reasoningGym": {"name": "chain_sum"}},
        "sampling": {"maxTokens": 8},
        "rewards": [{"name": "answer", "verifier": {}}],
    }
    least = {
        "model": {"scratch": {}},
        "task": task,
        "pipeline": {"batchGroups": 1, "steps": 1},
        "generators": [{"name": "g", "engine": {"hf": {}}}],
    }
    return {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": least | spec}


def mistakes(data: object) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        parse_job(data)
    return str(caught.value).splitlines()


def test_defaults_are_the_vetted_setting() -> None:
    job = parse_job(document())
    assert (job.spec.algorithm.key, job.spec.weights.key, job.spec.trainer.engine.key) == ("grpo", "http", "torch")
    assert (job.spec.pipeline.mode, job.spec.pipeline.staleness) == ("StreamAsync", 1)
    assert job.spec.scheduling.dispatch.key == "longestFirst"
    assert job.spec.generators[0].scaling.value.replicas == 1


def test_a_job_survives_being_written_and_read() -> None:
    job = parse_job(document(seed=3))
    assert RLJob.model_validate_json(job.model_dump_json(by_alias=True)) == job


def test_every_mistake_is_one_line() -> None:
    data = document(seed=-1, quantum=1, pipeline={"steps": "3"})
    assert mistakes(data) == [
        "spec.seed: must be a whole number from 0 to 2147483647, got -1",
        "spec.pipeline.batchGroups: is required; give a whole number from 1 to 65536",
        "spec.pipeline.steps: must be a whole number from 1 to 10000000, got '3'; remove the quotes",
        "spec.quantum: is not a known field; known: seed, model, task, algorithm, pipeline, scheduling, generators, trainer, weights, storage, trackers, commonMetadata, serviceAccount, failurePolicy, tracing, maxCost, suspend, managedBy, gang, startDeadlineSeconds, activeDeadlineSeconds, ttlSecondsAfterFinished",
    ]


@pytest.mark.parametrize("data", [None, [], "x", 3, float("nan"), [{}]])
def test_what_is_no_mapping_is_refused(data: object) -> None:
    assert mistakes(data)[0].startswith("(document): must be a mapping with apiVersion, kind, metadata, spec")


def test_what_json_cannot_carry_is_refused() -> None:
    assert mistakes({"kind": object()})[0].startswith("(document): must be plain data")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(number: float) -> None:
    assert mistakes(document(trainer={"learningRate": number}))[0].startswith(
        "spec.trainer.learningRate: must be a number above 0 and at most 1"
    )


@pytest.mark.parametrize(
    ("trainer", "number_format"),
    [
        ({}, "FP32"),
        ({"pod": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}, "BF16"),
        ({"pod": {"resources": {"limits": {"amd.com/gpu": "1"}}}}, "BF16"),
        ({"pod": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "precision": "FP32"}, "FP32"),
        ({"pod": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "precision": "TF32"}, "FP32"),
        ({"precision": "BF16"}, "BF16"),
    ],
)
def test_the_number_format_follows_from_the_job(trainer: dict[str, Any], number_format: str) -> None:
    assert parse_job(document(trainer=trainer)).spec.trainer.number_format == number_format


@pytest.mark.parametrize(
    ("mode", "staleness", "fault"),
    [
        ("StreamSync", None, ""),
        ("StreamSync", 0, ""),
        ("StreamAsync", None, ""),
        ("StreamAsync", 1, ""),
        ("StreamAsync", 64, ""),
        ("StreamSync", 1, "maxStalenessSteps must be 0 (or absent) with mode StreamSync, got 1"),
        ("StreamAsync", 0, "maxStalenessSteps must be at least 1 with mode StreamAsync, got 0"),
    ],
)
def test_staleness_fits_the_mode(mode: str, staleness: int | None, fault: str) -> None:
    pipeline: Mapping[str, object] = {"mode": mode, "batchGroups": 1, "steps": 1}
    if staleness is not None:
        pipeline |= {"maxStalenessSteps": staleness}
    if fault:
        assert mistakes(document(pipeline=pipeline)) == [f"spec.pipeline: {fault}"]
    else:
        assert parse_job(document(pipeline=pipeline)).spec.pipeline.staleness == (staleness or (mode == "StreamAsync"))


@pytest.mark.parametrize(
    ("quantity", "size_bytes"),
    [("1", 1), ("3k", 3000), ("2Ki", 2048), ("64Mi", 64 * 2**20), ("1G", 10**9), ("5Ti", 5 * 2**40)],
)
def test_byte_quantities(quantity: str, size_bytes: int) -> None:
    assert parse_bytes(quantity) == size_bytes
    assert parse_job(document(scheduling={"maxBufferBytes": quantity}))


@pytest.mark.parametrize("quantity", ["0", "-1", "1.5Gi", "64MB", "Ki", "1 Ki", "", "1Ki\n", "9" * 17])
def test_odd_byte_quantities_are_refused(quantity: str) -> None:
    assert mistakes(document(scheduling={"maxBufferBytes": quantity}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["spec", "model", "task", "rewards", "name", "x"]), inner, max_size=4)
        ),
    )
)
def test_any_data_give_lines_and_nothing_else(data: object) -> None:
    assert all(": " in line for line in mistakes(data))


@given(name=st.text(max_size=12))
def test_suggestions_are_known_names(name: str) -> None:
    known = ["maxTokens", "topP", "temperature"]
    advice = suggest(name, known)
    assert advice == f"known: {', '.join(known)}" or advice.removeprefix("did you mean ").removesuffix("?") in known


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_tokens", "maxTokens"), ("maxtokens", "maxTokens"), ("MaxToken", "maxTokens"), ("temprature", "temperature")],
)
def test_a_slip_is_recognised(name: str, meant: str) -> None:
    assert suggest(name, ["maxTokens", "topP", "temperature"]) == f"did you mean {meant}?"


def test_a_required_field_with_a_slip_in_its_name_is_one_mistake() -> None:
    assert [line for line in mistakes({"spec": {"tusk": {}}}) if "task" in line] == [
        "spec.tusk: is not a known field; did you mean task?"
    ]


def test_errors_say_field_rule_value_and_remedy() -> None:
    assert str(UserError(field="a.b", rule="must be 1", got=2, fix="write 1")) == "a.b: must be 1, got 2; write 1"
    assert str(UserError(field="a.b", rule="is required")) == "a.b: is required"
    assert len(shorten("x" * 1000)) == 120
    assert shorten("a\nb") == r"'a\nb'"
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shorten(deep) == "a list that is too long to show"


@pytest.mark.parametrize(
    ("path", "kind", "text", "units"),
    [
        ("spec.pipeline.steps", "integer", "a whole number from 1 to 10000000", "steps"),
        ("spec.task.sampling.temperature", "number", "a number above 0 and at most 10", ""),
        ("spec.algorithm.grpo.clipLow", "number", "a number above 0 and below 1", ""),
        ("spec.algorithm.grpo.normalizeStd", "boolean", "true or false", ""),
        ("spec.trainer.schedule", "string", "one of Constant, Linear, Cosine", ""),
        (
            "spec.trainer.costPerHour",
            "string",
            "a decimal number in quotes (such as '1.00') of at most 16 characters",
            "per hour",
        ),
        ("spec.task.sampling.stop", "[]string", "a list of at most 16 items", ""),
        (
            "spec.scheduling.dispatch",
            "object",
            "a mapping with fields of fifo, longestFirst, skewAware, auto, python",
            "",
        ),
        ("spec.task.dataset.reasoningGym.parameters", "object", "a mapping of at most 64 entries", ""),
    ],
)
def test_fields_in_plain_words(path: str, kind: str, text: str, units: str) -> None:
    schema = schema_at(path)
    assert schema is not None
    assert (type_name(schema), allowed(schema), unit(path.rsplit(".", 1)[1])) == (kind, text, units)


def test_names_of_other_systems_lead_to_fields_that_are_there() -> None:
    root = plain_schema(RLJob)
    for name, here in PEERS_NAMES.items():
        for path in f"spec.{here}".split(" and "):
            assert schema_at(path, root=root) is not None, (name, path)
    found = mistakes(document(algorithm={"grpo": {"beta": 0.1}}))
    assert found == [
        "spec.algorithm.grpo.beta: is not a known field; here it is spec.algorithm.grpo.referenceKl.coefficient"
    ]


def test_paths() -> None:
    assert path_text(("spec", "generators", 0, "name")) == "spec.generators[0].name"
    assert schema_at("spec.generators[0].name") == schema_at("spec.generators.name") is not None
    assert schema_at("spec.nothing") is None
    assert schema_at("") == job_schema()


def test_schemas_carry_bounds_defaults_and_rules() -> None:
    pipeline = plain_schema(Pipeline)
    assert pipeline["properties"]["maxStalenessSteps"]["maximum"] == 64
    assert [rule["message"] for rule in pipeline["x-kubernetes-validations"]] == [
        rule.message for rule in Pipeline.field_rules
    ]
    assert schema_at("spec.algorithm")["default"] == {"grpo": {}}  # type: ignore[index]
    assert "$" not in "".join(plain_schema(RLJobStatus))
