"""`streamrl plan --optimize --pool-devices`: pools of several clusters, which ones to leave out, and why."""

import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from streamrl.latency import LatencyCurve
from streamrl.link_shares import ClusterRates, best_plan
from streamrl_cli.cluster.sizes import clusters
from streamrl_operator.allocation.stage_times import Replica, generation_curve
from support.plans import SAMPLES, SLOTS, PlanFiles, job, pool_profile, profile

TRAINING = {1: 4.0, 4: 1.0}
MILLISECONDS = {"home": 10.0, "near": 8.0, "thin": 8.0}
COSTS = {"home": "2.00", "near": "1.00", "thin": "0.25"}
LINKS = {"near": 100_000_000, "thin": 1_000_000}
VERSION = 20_000_000
DEVICES = {"home": 3, "near": 3, "thin": 3}
FLAGS = ("--link", "near=100M", "--link", "thin=1M", "--version-bytes", "20M")


def three(*, scaling: dict[str, Any] | None = None, **http: Any) -> dict[str, Any]:
    """At home, near, and behind a thin link; that one has the cheapest devices."""
    made = job()
    first = made["spec"]["generators"][0]
    made["spec"]["generators"] = [
        first
        | {"name": name, "costPerHour": COSTS[name]}
        | ({} if name == "home" else {"clusterName": name})
        | ({"scaling": scaling} if scaling else {})
        for name in MILLISECONDS
    ]
    if http:
        made["spec"]["weights"] = {"http": http}
    return made


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanFiles:
    made = PlanFiles(tmp_path, capsys)
    made.write(three(), measured())
    return made


def measured() -> dict[str, Any]:
    pools = [pool_profile(name, milliseconds=each) for name, each in MILLISECONDS.items()]
    return profile(pools=pools, training=TRAINING)


def flags(devices: dict[str, int] | None = None, *, trainers: int = 3) -> tuple[str, ...]:
    counts = (("--pool-devices", f"{name}={count}") for name, count in (devices or DEVICES).items())
    return (*(flag for pair in counts for flag in pair), "--trainer-devices", str(trainers))


def replicas(files: PlanFiles, *arguments: str) -> dict[str, int]:
    """By pool, of the objects."""
    done = files.optimise(*arguments, "-o", "json")
    assert done.code == 0, done.err
    items = json.loads("\n".join(done.out))["items"]
    prefix = "simulated-"
    return {
        one["metadata"]["name"].removeprefix(prefix): one["spec"]["replicas"]
        for one in items
        if one["kind"] == "GeneratorPool"
    }


def cheapest(*, tolerance: float, overlapped: bool) -> tuple[float, dict[str, int], int]:
    """Cost of a step, replicas, processes: all subsets of clusters, all numbers of replicas and of processes."""
    found = []
    curves = {
        name: generation_curve(
            Replica(curve=LatencyCurve.of_milliseconds([(1, ms), (SLOTS, ms)]), slots=SLOTS),
            lengths=[100],
            samples=SAMPLES,
            most=3,
        )
        for name, ms in MILLISECONDS.items()
    }
    full = sum(LINKS.values())
    for counts in product(range(4), repeat=3):
        sizes = {name: count for name, count in zip(MILLISECONDS, counts, strict=True) if count}
        if not sizes:
            continue
        clusters = {}
        for name, count in sizes.items():
            rates: dict[str, float] = {"sample_s": curves[name].at(count) / SAMPLES}
            if name in LINKS:
                rates |= {"version_s": VERSION / full, "sample_bytes_s": 800 / full, "most_link": LINKS[name] / full}
            clusters[name] = ClusterRates(**rates)
        made_s = best_plan(clusters, samples=SAMPLES, is_overlapped=overlapped).step_s
        hourly = sum(float(COSTS[name]) * count for name, count in sizes.items())
        for processes in (1, 2, 3):
            step_s = max(made_s, min(MILLISECONDS[name] for name in sizes) / 10, 4.0 / processes)
            found.append((step_s, (hourly + 2 * processes) * step_s / 3600, sizes, processes))
    limit_s = min(step_s for step_s, *_ in found) * (1 + tolerance)
    _, cost, sizes, processes = min((one for one in found if one[0] <= limit_s * (1 + 1e-9)), key=lambda one: one[1])
    return cost, sizes, processes


@pytest.mark.parametrize("mode", ["StreamAsync", "StreamSync"])
@pytest.mark.parametrize("tolerance", [0, 5, 50])
def test_a_cluster_behind_a_thin_link_is_left_out_as_trying_everything_says(
    files: PlanFiles, *, mode: str, tolerance: int
) -> None:
    arguments = (*flags(), *FLAGS, "--set", f"spec.pipeline.mode={mode}", "--tolerance-percent", str(tolerance))
    cost, sizes, processes = cheapest(tolerance=tolerance / 100, overlapped=mode == "StreamAsync")
    assert "thin" not in sizes
    assert len(sizes) == 2
    assert replicas(files, *arguments) == sizes
    text = files.optimise(*arguments).out
    row = next(line for line in text if line.endswith("<- chosen")).split()
    assert float(row[-3]) == pytest.approx(cost * 1000 / SAMPLES, rel=1e-3)
    assert f"--set spec.trainer.processesPerNode={processes}" in text[-1]


def test_why_tells_the_clusters_the_choices_beside_and_what_is_left_out(files: PlanFiles) -> None:
    text = files.optimise(*flags(), *FLAGS).out
    lines = text[next(number for number, line in enumerate(text) if line.startswith("WHY ")) :]
    assert lines[0].endswith("none in pool thin and 3 trainer processes")
    shares = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:5]}
    assert shares["near"].endswith("0.2 s")
    assert shares["thin"] == "0 in thin left out - 20 s"
    choices = [line.split("  ")[1] for line in lines[7:11]]
    assert choices == ["(home), near", "near", "(home)", "(home), near, thin"]
    assert "  thin is left out: a version takes it 20 s, a step 1.333 s" in lines
    assert "  a version: 20,000,000 bytes to each other cluster" in lines
    assert lines[-1].startswith(f"to use it: take pool thin out of {files.job}, then streamrl submit {files.job} --set")


def test_a_step_is_not_shorter_than_the_longest_answer_on_a_pool_that_is_taken(files: PlanFiles) -> None:
    pools = [pool_profile(name, milliseconds=each) for name, each in (("home", 10), ("near", 10), ("thin", 1))]
    files.write(three(), profile(pools=pools, training={1: 0.4, 4: 0.1}))
    text = files.optimise(*flags(dict.fromkeys(DEVICES, 16)), *FLAGS).out
    row = next(line for line in text if line.endswith("<- chosen")).split()
    assert "thin" not in row
    assert float(row[row.index("s") - 1]) >= 100 * 0.010, "100 tokens at 10 ms"
    assert any("the longest answer alone takes 1 s" in line for line in text)


def test_a_search_that_is_ended_says_so(files: PlanFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "  best found so far: each search ends after 2,000 plans, and a cheaper one may be left"
    assert line not in files.optimise(*flags(), *FLAGS).out
    monkeypatch.setattr(clusters, "over_clusters", partial(clusters.over_clusters, most_plans=0))
    assert line in files.optimise(*flags(), *FLAGS).out


def test_a_cheap_cluster_that_only_costs_time_is_left_out_with_both_costs_named(files: PlanFiles) -> None:
    dear = three()
    dear["spec"]["generators"][2]["costPerHour"] = "90.00"
    files.write(dear, measured())
    text = files.optimise(*flags(), "--link", "near=100M", "--link", "thin=100M", "--version-bytes", "20M").out
    assert any(line.startswith("  thin is left out: with it 1000 samples would cost ") for line in text)


def test_links_are_what_the_job_lets_the_trainer_send(files: PlanFiles) -> None:
    files.write(three(remoteBytesPerSecond="100M"), measured())
    assert "thin" in replicas(files, *flags(), "--version-bytes", "20M")
    assert "thin" not in replicas(files, *flags(), "--version-bytes", "20M", "--link", "thin=1M")
    files.write(three(uplinkBytesPerSecond="4M"), measured())
    assert list(replicas(files, *flags(), "--version-bytes", "20M")) == ["home"]


def test_the_size_of_a_version_is_that_of_the_model(files: PlanFiles) -> None:
    text = "\n".join(files.optimise(*flags(), "--link", "near=100M", "--link", "thin=1M").out)
    needed = re.search(r"about ([0-9,]+) parameters", text)
    counted = re.search(r"a version: ([0-9,]+) bytes", text)
    assert needed is not None and counted is not None
    assert int(counted[1].replace(",", "")) == 4 * int(needed[1].replace(",", "")), "float32"
    files.write(three(deltas=True), measured())
    text = "\n".join(files.optimise(*flags(), "--link", "near=100M", "--link", "thin=1M").out)
    assert "with deltas it is smaller, and --version-bytes says how much" in text


def test_bounds_of_an_elastic_pool_are_kept(files: PlanFiles) -> None:
    scaling = {"auto": {"initialReplicas": 2, "minReplicas": 2, "maxReplicas": 2}}
    files.write(three(scaling=scaling), measured())
    assert set(replicas(files, *flags(), *FLAGS).values()) == {2}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--pool-devices", "home=3", "--trainer-devices", "2"), "--pool-devices: must be given for each pool; add --pool-devices near=N"),
        (("--pool-devices", "home=3"), "--pool-devices: needs the devices that can train; give --trainer-devices N"),
        (("--pool-devices", "home=3", "--devices", "4"), "--pool-devices: is not used with --devices; give --trainer-devices N"),
        (("--devices", "4", "--link", "near=3M"), "--link: is used with --pool-devices, for pools in several clusters; add --pool-devices POOL=N for each pool"),
        ((*flags(), "--link", "near=1M"), "--link: is not known of cluster thin; add --link thin=BYTES, or spec.weights.http.remoteBytesPerSecond"),
        ((*flags(), "--link", "far=1M"), "--link: must name one of near, thin, got 'far'"),
        ((*flags(), "--link", "near=much"), "--link: must be a byte quantity above 0, such as 50M, got 'much'"),
        ((*flags(), *FLAGS[:4], "--version-bytes", "0"), "--version-bytes: must be a byte quantity above 0, such as 50M, got '0'"),
        (("--pool-devices", "home=all", "--trainer-devices", "2"), "--pool-devices: must be POOL=N, N a number of devices from 1 on, got 'home=all'"),
        (("--pool-devices", "x=1", "--trainer-devices", "2"), "--pool-devices: must name one of home, near, thin, got 'x'"),
        ((*flags(trainers=0), *FLAGS), "trainer devices: must be enough for one trainer, got 0"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line(files: PlanFiles, arguments: tuple[str, ...], line: str) -> None:
    done = files.optimise(*arguments)
    assert (done.code, done.out, done.err) == (2, [], [line])


def test_links_belong_to_optimize(files: PlanFiles) -> None:
    assert files.plan("--link", "near=1M").err == ["--link: is used with --optimize; add --optimize"]


def test_a_folder_is_read_by_each_generator_for_itself(files: PlanFiles) -> None:
    made = three()
    made["spec"]["weights"] = {"folder": {"url": "s3://bucket/weights"}}
    files.write(made, measured())
    assert "from a folder each generator reads it for itself" in "\n".join(files.optimise(*flags(), *FLAGS).out)
    missing = "--link: is not known of cluster thin; add --link thin=BYTES"
    assert files.optimise(*flags(), "--link", "near=1M").err == [missing]
