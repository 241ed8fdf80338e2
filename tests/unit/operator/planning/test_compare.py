"""Whether an apply is needed: never for what an API server adds or writes otherwise, always for a change of ours."""

import copy
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.spec import parse_job
from streamrl_operator.planning.compare import differs, parse_quantity, with_claim_kept
from streamrl_operator.planning.objects import pool_replicas
from support.jobs import simulated_job
from support.planned import find, full_document, full_job, planned

OBJECTS = planned(full_job()) + planned(parse_job(simulated_job()))
MERGED = {"containers", "initContainers", "env", "volumes", "volumeMounts", "ownerReferences"}
SAME_QUANTITY = {
    "4": "4000m",
    "100Gi": "107374182400",
    "1Gi": "1024Mi",
    "32Gi": "34359738368",
    "20Gi": "20480Mi",
    "10Gi": "10240Mi",
}

Path = tuple[str | int, ...]


def stored(value: Any, *, rng: random.Random, name: str = "") -> Any:
    """`value` as an API server may show it: with defaults, empty things left out, quantities rewritten, merged lists in
    another order and with items of others."""
    if isinstance(value, dict):
        kept = {k: stored(v, rng=rng, name=k) for k, v in value.items() if v not in ("", [], None)}
        if name not in ("data", "labels", "matchLabels", "requests", "limits"):
            kept |= {f"serverDefault{rng.randrange(3)}": rng.choice([1, "x", {"a": []}])}
        return kept
    if isinstance(value, list):
        items = [stored(item, rng=rng) for item in value]
        if name in MERGED:
            items += [{"name": "injected", "mountPath": "/injected", "uid": "injected"}]
            rng.shuffle(items)
        return items
    if name in ("cpu", "memory", "storage", "sizeLimit"):
        return SAME_QUANTITY.get(value, value)
    return value


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every scalar with the way to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


LEAVES = [(index, path) for index, each in enumerate(OBJECTS) for path, _ in leaves(each)]


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("index", range(len(OBJECTS)))
def test_what_is_not_there_is_made_and_what_is_there_is_clean(index: int) -> None:
    assert differs(OBJECTS[index], None)
    assert not differs(OBJECTS[index], copy.deepcopy(OBJECTS[index]))


@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, len(OBJECTS) - 1), seed=st.integers(0, 10_000))
def test_what_the_server_adds_is_no_difference(index: int, seed: int) -> None:
    assert not differs(OBJECTS[index], stored(OBJECTS[index], rng=random.Random(seed)))


@settings(max_examples=300, deadline=None)
@given(leaf=st.sampled_from(LEAVES), seed=st.integers(0, 10_000))
def test_a_change_of_any_field_of_ours_is_a_difference(leaf: tuple[int, Path], seed: int) -> None:
    index, path = leaf
    edited = copy.deepcopy(OBJECTS[index])
    at(edited, path[:-1])[path[-1]] = other(at(edited, path))
    assert differs(OBJECTS[index], edited)
    assert differs(OBJECTS[index], stored(edited, rng=random.Random(seed)))


@settings(max_examples=300, deadline=None)
@given(leaf=st.sampled_from(LEAVES))
def test_a_field_of_ours_that_is_gone_is_a_difference(leaf: tuple[int, Path]) -> None:
    index, path = leaf
    edited = copy.deepcopy(OBJECTS[index])
    gone = at(edited, path[:-1]).pop(path[-1])
    assert differs(OBJECTS[index], edited) is (gone != "")  # an empty text is stored as none at all


def test_what_we_set_no_longer_is_a_difference() -> None:
    document = full_document()
    del document["spec"]["trainer"]["pod"]["nodeSelector"]
    after = planned(parse_job(document))
    found = [new["metadata"]["name"] for old, new in zip(planned(full_job()), after, strict=True) if differs(new, old)]
    assert found == ["full-trainer"]


def test_a_claim_keeps_the_class_that_it_was_made_with() -> None:
    """Whatever the administrator's defaults say by now: it cannot change, and a refused claim would hold up the job."""
    classed = {name: {**claim("10Gi"), "spec": {**claim("10Gi")["spec"], "storageClassName": name}} for name in "ab"}
    assert with_claim_kept(classed["b"], classed["a"]) == classed["a"]
    assert with_claim_kept(claim("10Gi"), classed["a"]) == classed["a"]


def test_a_claim_never_shrinks() -> None:
    assert with_claim_kept(claim("10Gi"), claim("20480Mi")) == claim("20480Mi")
    for observed in (claim("5Gi"), claim("10Gi"), None):
        assert with_claim_kept(claim("10Gi"), observed) == claim("10Gi")
    for each in OBJECTS:
        assert each["kind"] == "PersistentVolumeClaim" or with_claim_kept(each, each) is each


def claim(storage: str) -> dict[str, Any]:
    return {"kind": "PersistentVolumeClaim", "spec": {"resources": {"requests": {"storage": storage}}}}


def container(**parts: Any) -> dict[str, Any]:
    return {"kind": "StatefulSet", "containers": [{"name": "a", **parts}]}


@pytest.mark.parametrize(
    ("desired", "observed", "answer"),
    [
        (container(resources={"limits": {"cpu": "1"}}), container(resources={"limits": {"cpu": "1000m"}}), False),
        (container(resources={"limits": {"cpu": "1"}}), container(resources={"limits": {"cpu": "1001m"}}), True),
        (
            container(resources={"requests": {"x.io/y": "2k"}}),
            container(resources={"requests": {"x.io/y": "2000"}}),
            False,
        ),
        (container(env=[{"name": "N", "value": "1"}]), container(env=[{"name": "N", "value": "1000m"}]), True),
        (container(env=[{"name": "N", "value": ""}]), container(env=[{"name": "N"}]), False),
        (container(env=[{"name": "N", "value": "1"}]), container(), True),
        (container(command=["a", "b"]), container(command=["b", "a"]), True),
        (container(command=["a"]), container(command=["a", "b"]), True),
        (container(tolerations=[]), container(), False),
        (  # one volume at two places, in another order
            container(volumeMounts=[{"mountPath": "/a", "name": "v"}, {"mountPath": "/b", "name": "v"}]),
            container(volumeMounts=[{"mountPath": "/b", "name": "v"}, {"mountPath": "/a", "name": "v"}]),
            False,
        ),
        (container(allowed=False), container(), True),  # the default may be true
        (container(allowed=False), container(allowed=True), True),
        (container(replicas=0), container(replicas=0), False),
        (container(replicas=0), container(), True),
        (
            container(ports=[{"containerPort": 1, "protocol": "TCP"}]),
            container(ports=[{"containerPort": 1, "protocol": "UDP"}, {"containerPort": 1}]),
            True,  # its protocol is ours to say: nothing is there at it
        ),
        (
            {"kind": "Service", "ports": [{"port": 1, "targetPort": 2}]},
            {"ports": [{"port": 1, "targetPort": "2"}], "kind": "Service"},
            False,
        ),
        (
            {"kind": "Service", "ports": [{"port": 1, "targetPort": 2}]},
            {"ports": [{"port": 1, "targetPort": 3}], "kind": "Service"},
            True,
        ),
        ({"maxUnavailable": "10%"}, {"maxUnavailable": 10}, True),
        (claim("10Gi"), claim("10240Mi"), False),
        (claim("20Gi"), claim("10Gi"), True),
        ({"sizeLimit": "1Gi"}, {"sizeLimit": "1024Mi"}, False),
        ({"a": {"b": 1}}, {"a": [1]}, True),
        ({"a": [1]}, {"a": {"b": 1}}, True),
        ({"a": "1"}, {"a": 1}, True),
        ({"a": None}, {}, False),
        ({"a": {}}, {"a": {"b": 1}}, False),
    ],
)
def test_table(desired: dict[str, Any], observed: dict[str, Any], *, answer: bool) -> None:
    assert differs(desired, observed) is answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("1000m", 1),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1.5Gi", 3 * 2**29),
        ("2k", 2000),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("12E-1", Fraction(12, 10)),
        ("1Ei", 2**60),
        ("100n", Fraction(1, 10**7)),
        ("", None),
        ("Gi", None),
        ("1 Gi", None),
        ("-1", None),
    ],
)
def test_quantities(text: str, number: int | Fraction | None) -> None:
    assert parse_quantity(text) == number


def test_replicas_of_a_pool_are_compared_alone() -> None:
    desired = pool_replicas(find(planned(full_job()), "GeneratorPool", "full-auto"), replicas=2)
    pool = next(each for each in OBJECTS if each["kind"] == "GeneratorPool" and each["metadata"]["name"] == "full-auto")
    assert differs(desired, pool)
    assert not differs(desired, pool | {"spec": pool["spec"] | {"replicas": 2}})
    assert not differs(pool, pool | {"spec": pool["spec"] | {"replicas": 7}})
