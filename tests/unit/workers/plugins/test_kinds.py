"""Each kind of plug-in does what its base says, and comes to it by one mechanism: a class in a file, and its options."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl import plugins
from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl.spec.trackers import Trackers
from streamrl_workers.plugins.kinds import KINDS, plugins_of
from streamrl_workers.plugins.load import check_plugins, load_at
from streamrl_workers.plugins.protocol import NAMES
from streamrl_workers.scheduler.dispatch import policy
from streamrl_workers.scheduler.dispatch.order import Candidate, PlannedBatch
from streamrl_workers.trackers.registry import ScalarPoint, TrackedRun, open_run
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import GroupAlgorithm, TokenBatch
from streamrl_workers.trainer.engines.training_step import rewarded
from support.trainer_groups import make_group, trainer_spec
from support.tree import ROOT

SOURCE = """
from streamrl.plugins import (
    Corrected, DispatchPolicy, GroupAdvantage, Order, PluginOptions, SampleCorrection, Tracker, group_relative
)


class PerReward(GroupAdvantage):
    '''As in GDPO: each reward is normalised by itself.'''

    protocol = 1

    class Options(PluginOptions):
        names: tuple[str, ...]

    def advantages(self, samples):
        rows = [group_relative([s.parts[n] for s in samples], normalize_std=True) for n in self.options.names]
        return [sum(column) for column in zip(*rows)]


class Halved(SampleCorrection):
    protocol = 1

    def __call__(self, *, proximal_N, behaviour_N, sequences_N):
        return Corrected(anchor_N=behaviour_N, weight_N=proximal_N.new_full(proximal_N.shape, 0.5))

    def mask(self, log_ratio_N):
        return log_ratio_N < 0


def newest(candidate):
    return (-candidate.group_id,)


class NewestFirst(DispatchPolicy):
    protocol = 1

    class Options(PluginOptions):
        why: str

    def order(self, batch):
        return Order(key=newest, why=self.options.why)


class Lines(Tracker):
    protocol = 1

    def scalars(self, points):
        with (self.run.folder / "lines").open("a") as file:
            file.writelines(f"{point.step} {name}\\n" for point in points for name in point.values)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "plug_kinds.py").write_text(SOURCE)
    return folder


def named(name: str, **options: Any) -> dict[str, Any]:
    return {"python": {"class": f"plug_kinds:{name}", "options": options}}


def test_an_advantage_takes_the_place_of_the_algorithms_own(directory: Path) -> None:
    [sample, *_] = (group := make_group(1, rewards=[1.0, 2.0, 3.0])).samples
    for n, one in enumerate(group.samples):
        one.reward_parts.update(right=float(n == 0), short=100.0 * n)
    assert dict(rewarded(sample).parts) == {"right": 1.0, "short": 0.0}
    algorithm = create_algorithm(
        with_part("algorithm.advantage", named("PerReward", names=["right", "short"])), plugin_dir=directory
    )
    assert isinstance(algorithm, GroupAlgorithm)
    got = algorithm.group_advantages([rewarded(one) for one in group.samples])
    assert got == pytest.approx([2**0.5 - 1.5**0.5, -(0.5**0.5), 1.5**0.5 - 0.5**0.5], abs=1e-5)


def test_a_correction_has_weights_and_a_mask(directory: Path) -> None:
    algorithm = create_algorithm(trainer_spec(correction=named("Halved")), plugin_dir=directory)
    assert algorithm.mask is not None
    assert algorithm.mask(torch.tensor([-1.0, 1.0])).tolist() == [True, False]
    two = torch.tensor([-1.0, -2.0])
    batch = TokenBatch(
        logprobs_N=two,
        behaviour_N=two,
        proximal_N=two,
        advantages_N=two,
        sequences_N=torch.tensor([0, 0]),
        kept_N=torch.tensor([True, False]),
    )
    assert algorithm.corrected(batch).weight_N.tolist() == [0.5, 0.0]


def with_part(at: str, part: dict[str, Any], **job: Any) -> RLJobSpec:
    document = trainer_spec(**job).model_dump(mode="json", by_alias=True, exclude_none=True)
    first, *rest = at.split(".")
    document[first] = {**document[first], rest[0]: part} if rest else {**document[first], **part}
    return RLJobSpec.model_validate_json(json.dumps(document))


def test_a_dispatch_policy_orders_what_waits_and_is_not_run_by_who_reads_a_journal(directory: Path) -> None:
    spec = with_part("scheduling.dispatch", named("NewestFirst", why="as asked"))
    order = policy("python", load_at(spec, "scheduling.dispatch.python", directory=directory)).order(
        PlannedBatch(trusted=False)
    )
    waiting = [Candidate(group_id=n, batch=0, place=n, predicted_tokens=1.0) for n in range(3)]
    assert (order.why, [one.group_id for one in sorted(waiting, key=order.key)]) == ("as asked", [2, 1, 0])
    assert policy("python", spec.scheduling.dispatch.value).order(PlannedBatch(trusted=False)).key is not order.key


def test_a_tracker_is_opened_with_its_run(directory: Path, tmp_path: Path) -> None:
    trackers = Trackers.model_validate(named("Lines"))
    run = TrackedRun(id="1", name="run", folder=tmp_path, config={}, next_step=0)
    [(key, options)] = trackers.named().items()
    tracker = open_run(key, options, run=run, plugin_dir=directory)
    tracker.scalars([ScalarPoint(kind="train", step=3, time_s=0.0, values={"loss": 1.0})])
    tracker.samples([], step=3)
    tracker.flush()
    tracker.close("succeeded")
    assert (tmp_path / "lines").read_text() == "3 loss\n"


def test_a_plug_in_of_another_kind_is_refused(directory: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^spec\.algorithm\.advantage\.python\.class: must be a class that derives from GroupAdvantage ",
    ):
        check_plugins(with_part("algorithm.advantage", named("Halved")), directory=directory)


def test_an_advantage_of_samples_does_not_go_with_one_of_tokens(directory: Path) -> None:
    (directory / "plug_batch.py").write_text(
        "from streamrl.plugins import BatchAlgorithm\n"
        "class Whole(BatchAlgorithm):\n    protocol, aggregation = 1, 'TokenMean'\n"
        "    def values(self, views): ...\n    def token_loss(self, batch): ...\n"
    )
    whole = {"rule": "python", "algorithm": {"class": "plug_batch:Whole"}}
    spec = with_part("algorithm.advantage", named("PerReward", names=["a"]), **whole)
    with pytest.raises(
        UserError,
        match=r"^spec\.algorithm\.advantage: goes with algorithms that derive from GroupAlgorithm, got 'Whole'",
    ):
        create_algorithm(spec, plugin_dir=directory)


def test_each_kind_is_found_where_the_table_says() -> None:
    part = {"python": {"class": "own:Mine"}}
    found = []
    for kind in KINDS:
        at = kind.at.removesuffix(".python")
        spec = trainer_spec(rule="python", algorithm=part["python"]) if at == "algorithm" else with_part(at, part)
        found += [plugin.field for plugin in plugins_of(spec)]
    assert found == [f"spec.{kind.at}.class" for kind in KINDS]


def test_the_examples_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, test = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plugins.md").read_text(), flags=re.DOTALL)
    (tmp_path / "my_loss.py").write_text(loss)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    scope: dict[str, Any] = {}
    exec(test, scope)
    scope["test_weighted"]()
    wrong = test.replace("20.0", "2.0")
    exec(wrong, scope)
    with pytest.raises(AssertionError, match=r"^losses \(seed 0\) differ, most at token \d+: .* the loop has "):
        scope["test_weighted"]()


def test_the_page_lists_each_kind_and_each_name() -> None:
    page = (ROOT / "docs/plugins.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []
    assert [kind.at for kind in KINDS if f"`spec.{kind.at}`" not in page or f"`{kind.group}`" not in page] == []
    assert [name for name in NAMES if getattr(plugins, name).__name__ != name] == []
    with pytest.raises(ImportError):
        from streamrl.plugins import absent  # type: ignore[attr-defined] # noqa: F401
