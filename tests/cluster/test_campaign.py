"""A seeded sample of the campaigns on a real control plane; `make campaign` runs all of them (docs/benchmarks/track-record.md).

STREAMRL_CAMPAIGN_SEED takes another sample. All cases run at once, in one go, before the first test looks at its own: most of a case is waiting.
"""

import asyncio
import os
import random

import pytest

from cluster.campaign.cases import Result, crashes
from cluster.campaign.command import again, run_named
from cluster.campaign.faults import drawn
from cluster.campaign.mistakes import POD_MISTAKES
from cluster.campaign.scenarios import SCENARIOS
from cluster.harness.base import Cluster

pytestmark = pytest.mark.timeout(1800)

SEED = int(os.environ.get("STREAMRL_CAMPAIGN_SEED", "0"))
LEAST_WRITES = {
    "create": 39,
    "scale": 10,
    "edit": 4,
    "convert": 14,
    "suspend": 12,
    "resume": 12,
    "fail": 10,
    "delete": 33,
    "recreate": 38,
}
"""Of an undisturbed run, about: a number that is too high is a death at rest."""


def _sample(rng: random.Random) -> list[str]:
    crashed = [name for scenario, writes in LEAST_WRITES.items() for name in crashes(scenario, writes)]
    faults = [f"{scenario}/faults/{rng.randrange(10_000)}" for scenario in rng.sample(sorted(SCENARIOS), 2)]
    specs = [f"spec/pair/{rng.randrange(10_000)}", f"spec/pod/{rng.randrange(len(POD_MISTAKES))}"]
    return [*rng.sample(crashed, 5), *faults, *specs, f"spec/mistakes/{rng.randrange(10_000)}"]


SAMPLE = _sample(random.Random(SEED))


@pytest.fixture(scope="session")
def results(control_plane: Cluster, request: pytest.FixtureRequest) -> dict[str, Result]:
    """The results of the cases that were chosen."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    chosen = [item.callspec.params["case"] for item in items if "results" in item.fixturenames]
    done = asyncio.run(run_named(control_plane, chosen))
    return {result.name: result for result in done}


@pytest.mark.parametrize("case", SAMPLE)
def test_a_disturbed_run_ends_as_the_undisturbed(results: dict[str, Result], case: str) -> None:
    wrong = results[case].wrong
    assert not wrong, f"{wrong}\nagain: {again(case)}"


def _faults(seed: int) -> str:
    return "; ".join(map(str, drawn(random.Random(f"create/faults/{seed}"), writes=39).faults))


def test_the_same_seed_draws_the_same_faults() -> None:
    texts = [_faults(seed) for seed in range(50)]
    assert texts == [_faults(seed) for seed in range(50)]
    assert len(set(texts)) > 40
