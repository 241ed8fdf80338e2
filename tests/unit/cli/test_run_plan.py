"""Who gets which cores on one machine."""

import itertools
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec import RLJobSpec, parse_job
from streamrl_cli.runner.plan import ENV_VISIBLE, place, plan_run, visible_gpus
from support.jobs import simulated_job


def spec_of(
    *,
    ranks: int = 1,
    most: int = 1,
    mode: str = "StreamSync",
    model: dict[str, Any] | None = None,
    elastic: bool = False,
    engine: dict[str, Any] | None = None,
    lent: int = 0,
) -> RLJobSpec:
    """`lent`: generators of a second pool, on the trainer's devices."""
    job = simulated_job(staleness=0)
    job["spec"]["model"] = {"huggingFace": {"name": "big"}} if model is None else model
    job["spec"]["pipeline"]["mode"] = mode
    job["spec"]["generators"] = [{"name": "sim", "engine": engine or {"hf": {}}}]
    scaling = {"auto": {"maxReplicas": most}} if elastic else {"static": {"replicas": most}}
    job["spec"]["generators"][0]["scaling"] = scaling
    if lent:
        job["spec"]["generators"].append(lent_pool(lent))
    job["spec"]["trainer"] = {"processesPerNode": ranks}
    return parse_job(job).spec


def lent_pool(replicas: int) -> dict[str, Any]:
    return {"name": "lent", "engine": {"hf": {}}, "devices": "Trainer", "scaling": {"static": {"replicas": replicas}}}


def shares(spec: RLJobSpec, *, cores: int) -> tuple[list[Any], list[Any]]:
    placement = place(spec, cpus=range(cores))
    generating = placement.generators or placement.lent
    return tuple([(one.cpus, one.threads) for one in part] for part in (placement.ranks, generating))  # type: ignore[return-value] # a pair


@pytest.mark.parametrize(
    ("cores", "ranks", "generators", "trainer", "generating"),
    [
        (1, 1, 1, [((), 1)], [((), 1)]),  # nothing to deal
        (2, 1, 1, [((0,), 1)], [((1,), 1)]),
        (2, 1, 3, [((0,), 1)], [((1,), 1)]),  # three share the one that is left
        (2, 2, 1, [((), 1), ((), 1)], [((), 1)]),  # pinned ranks would leave the generator none
        (3, 2, 1, [((0,), 1), ((1,), 1)], [((2,), 1)]),
        (4, 1, 5, [((0,), 1)], [((1, 2, 3), 1)]),  # more than cores: all of the rest for each
        (8, 1, 1, [((0, 1, 2, 3), 4)], [((4, 5, 6, 7), 4)]),
        (8, 2, 2, [((0, 1), 2), ((2, 3), 2)], [((4, 5), 2), ((6, 7), 2)]),
        (9, 1, 3, [((0, 1), 2)], [((2, 3), 2), ((4, 5), 2), ((6, 7), 2)]),
    ],
)
def test_stages_that_work_at_once_get_cores_of_their_own(
    *, cores: int, ranks: int, generators: int, trainer: list[Any], generating: list[Any]
) -> None:
    for mode in ("StreamSync", "Batch"):
        assert shares(spec_of(ranks=ranks, most=generators, mode=mode), cores=cores) == (trainer, generating)


def test_without_generators_the_ranks_get_all_cores() -> None:
    spec = spec_of(ranks=2).model_copy(update={"generators": ()})
    assert shares(spec, cores=5) == ([((0, 1), 2), ((2, 3), 2)], [])
    assert plan_run(spec, cpus=range(5)).pools == {}


@pytest.mark.parametrize(
    ("cores", "ranks", "generators", "threads"),
    [(2, 1, 1, (2, 2)), (2, 2, 1, (1, 2)), (8, 2, 3, (4, 2)), (1, 1, 1, (1, 1))],
)
def test_stages_that_take_turns_get_all_cores(
    *, cores: int, ranks: int, generators: int, threads: tuple[int, int]
) -> None:
    trainer, generating = shares(spec_of(ranks=ranks, most=generators, mode="Colocated"), cores=cores)
    assert (trainer, generating) == ([((), threads[0])] * ranks, [((), threads[1])])


def test_a_small_model_computes_with_one_thread() -> None:
    small = {"scratch": {"hiddenSize": 96, "layers": 2}}
    for mode in ("Colocated", "StreamSync"):
        trainer, generating = shares(spec_of(mode=mode, model=small), cores=8)
        assert [threads for _, threads in trainer + generating] == [1, 1]
    large = {"scratch": {"hiddenSize": 1024, "layers": 4, "heads": 8}}
    assert shares(spec_of(mode="Colocated", model=large), cores=8)[0] == [((), 8)]


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 7, 16, 64])
@pytest.mark.parametrize(("ranks", "most"), [*itertools.product((1, 2, 4), (1, 3, 9))])
def test_every_process_has_a_core_and_stages_do_not_share_one(*, cores: int, ranks: int, most: int) -> None:
    placement = place(spec_of(ranks=ranks, most=most), cpus=range(cores))
    everyone = [*placement.ranks, *(placement.generator(number) for number in range(most))]
    assert all(one.threads >= 1 for one in everyone)
    assert len({bool(one.cpus) for one in everyone}) == 1, "pinned and unpinned processes would collide"
    taken = [set(one.cpus) for one in placement.ranks]
    generating = set().union(*(one.cpus for one in placement.generators))
    assert not any(one & generating for one in taken)
    assert all(not one & other for one, other in itertools.combinations(taken, 2))
    if cores >= ranks + most:
        assert len(placement.generators) == most, "enough for one each"


def test_an_elastic_pool_is_dealt_for_its_largest_size() -> None:
    spec = spec_of(most=3, elastic=True)
    plan = plan_run(spec, cpus=range(4))
    pinned = [plan.member("sim", ordinal=ordinal).env[keys.ENV_CPUS] for ordinal in range(3)]
    assert pinned == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("cores", "ranks", "lent", "expected"),
    [
        (1, 1, 1, [((), 1)]),  # nothing to deal
        (2, 1, 1, [((0,), 1)]),
        (2, 1, 3, [((0,), 1)]),
        (8, 2, 2, [((0, 1), 2), ((2, 3), 2)]),
        (8, 2, 1, [((0, 1, 2, 3), 4)]),
    ],
)
def test_a_lent_pool_is_where_the_trainer_is(
    *, cores: int, ranks: int, lent: int, expected: list[tuple[tuple[int, ...], int]]
) -> None:
    spec, alone = spec_of(ranks=ranks, most=ranks, lent=lent), spec_of(ranks=ranks, most=ranks)
    placement = place(spec, cpus=range(cores))
    assert [(share.cpus, share.threads) for share in placement.lent] == expected
    assert shares(spec, cores=cores) == shares(alone, cores=cores), "the others get what they would get without it"


@pytest.mark.parametrize(
    ("gpus", "ranks", "lent", "generating", "sharing"),
    [
        ((), 1, 1, None, [None]),
        ("01", 1, 1, "1", ["0"]),
        ("0123", 2, 3, "2", ["0", "1", "0"]),
    ],
)
def test_a_lent_pool_sees_the_trainers_gpus(
    *, gpus: tuple[str, ...], ranks: int, lent: int, generating: str | None, sharing: list[str | None]
) -> None:
    plan = plan_run(spec_of(ranks=ranks, lent=lent), cpus=range(16), gpus=tuple(gpus))
    assert plan.member("sim", ordinal=0).env.get(ENV_VISIBLE) == generating
    assert [plan.member("lent", ordinal=i).env.get(ENV_VISIBLE) for i in range(lent)] == sharing


def test_ranks_are_told_as_torchrun_tells_them() -> None:
    plan = plan_run(spec_of(ranks=2), cpus=range(4))
    assert [rank.name for rank in plan.ranks] == ["trainer-0", "trainer-1"]
    for number, rank in enumerate(plan.ranks):
        assert (rank.env["RANK"], rank.env["LOCAL_RANK"], rank.env["WORLD_SIZE"]) == (str(number), str(number), "2")
        assert rank.env["MASTER_ADDR"] == "127.0.0.1"
        assert rank.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert keys.ENV_CPUS not in plan.scheduler.env
    assert keys.ENV_THREADS not in plan.scheduler.env


@pytest.mark.parametrize(
    ("gpus", "ranks", "generators", "mode", "trainer", "generating"),
    [
        ((), 1, 1, "StreamSync", None, [None]),
        (("0",), 1, 2, "StreamSync", "0", ["0", "0"]),  # none is left: shared
        (("0", "1"), 1, 1, "StreamSync", "0", ["1"]),
        (("2", "3", "5", "7"), 2, 3, "Batch", "2,3", ["5", "7", "5"]),
        (("0", "1"), 2, 2, "Colocated", "0,1", ["0", "1"]),
    ],
)
def test_ranks_and_generators_see_gpus_of_their_own(
    *, gpus: tuple[str, ...], ranks: int, generators: int, mode: str, trainer: str | None, generating: list[str | None]
) -> None:
    plan = plan_run(spec_of(ranks=ranks, most=generators, mode=mode), cpus=range(16), gpus=gpus)
    assert [rank.env.get(ENV_VISIBLE) for rank in plan.ranks] == [trainer] * ranks
    assert [plan.member("sim", ordinal=i).env.get(ENV_VISIBLE) for i in range(generators)] == generating


@pytest.mark.parametrize(
    ("gpus", "mode", "generating"),
    [
        ((), "StreamSync", [None, None]),
        ("01234", "StreamSync", ["1,2", "3,4"]),
        ("012", "StreamSync", ["1,2", "1,2"]),
        ("01", "StreamSync", ["0,1", "0,1"]),  # one is left, two are needed: shared
        ("0123", "Colocated", ["0,1", "2,3"]),
    ],
)
def test_a_generator_gets_as_many_gpus_as_share_its_model(
    *, gpus: tuple[str, ...], mode: str, generating: list[str | None]
) -> None:
    spec = spec_of(most=2, mode=mode, engine={"vllm": {"tensorParallelSize": 2}})
    plan = plan_run(spec, cpus=range(8), gpus=tuple(gpus))
    assert [plan.member("sim", ordinal=i).env.get(ENV_VISIBLE) for i in range(2)] == generating


def test_more_gpus_than_there_are_is_one_line() -> None:
    with pytest.raises(UserError) as refused:
        plan_run(spec_of(engine={"vllm": {"tensorParallelSize": 4}}), cpus=range(8), gpus=("0", "1"))
    line = "spec.generators[0].engine.vllm.tensorParallelSize: must be at most 2, the GPUs of this machine, got 4"
    assert refused.value.lines == [line]


@pytest.mark.parametrize(("given", "seen"), [("", ()), ("-1", ()), ("1, 3", ("1", "3")), ("GPU-a1", ("GPU-a1",))])
def test_gpus_are_those_that_cuda_would_see(
    *, monkeypatch: pytest.MonkeyPatch, given: str, seen: tuple[str, ...]
) -> None:
    monkeypatch.setenv(ENV_VISIBLE, given)
    assert visible_gpus() == seen
