"""Where nothing queues: what two sides can win at all, beside what the policies choose. One batch of 1,024 samples at 20K.

    python benchmarks/dispatch_sides.py                # a table of docs/dispatch.md

For each draw of lengths and predictions: random static FIFO (the base), the plans that Algorithm 2 and `auto` make from the
predictions, and every split of a grid (the q longest predicted on m instances). "One split for all draws" is the split whose
mean is least: who sees predictions alone has nothing to tell one draw from another by, and no plan of two sides is better on
average. "Each draw's own split" is chosen with the true makespans in hand. A side that has more samples than slots issues the
others, longest predicted first, as slots free. All are makespans by the model; no core runs, and nothing moves later.
"""

import argparse
from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean, stdev

from dispatch.draws import draw, ranked, scores
from dispatch.models import BASE_DEALS, CURVE, POPULATION, SAMPLES, UNIT

from streamrl.spec.scheduling import Auto, SkewAware
from streamrl_cli.simulation.ranker import correlation_of
from streamrl_workers.scheduler.dispatch.auto import AutoPolicy
from streamrl_workers.scheduler.dispatch.makespan import Instance, Pace, bound_seconds, dealt, list_seconds
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, Candidate, Plan, Policy, Work
from streamrl_workers.scheduler.dispatch.skew_aware import SkewAwarePolicy
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.lengths.quality import rank_correlation_lower

POLICIES: dict[str, Policy] = {"Algorithm 2 (`Max`)": SkewAwarePolicy(SkewAware()), "`auto`": AutoPolicy(Auto())}
SPARE = 2
"""Slots for so many times the samples."""
TAILS = (16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384)
"""q of the grid; m is every number of instances."""

Split = tuple[int, int]


class Batch:
    """One draw."""

    def __init__(self, *, instances: int, recall: float, seed: int) -> None:
        chance = Random(f"{instances} {seed}")
        groups, past = (draw(POPULATION, groups=SAMPLES, chance=chance) for _ in range(2))
        said, past_said = (
            scores(part, correlation=correlation_of(recall), chance=Random(f"ranker {seed}")) for part in (groups, past)
        )
        lengths = ranked(said, past=past, past_said=past_said, unit=UNIT)
        quality = lengths.view().quality["Ranker"]
        assert quality.rank_correlation is not None
        self._tokens = [float(group.tokens[0]) for group in groups]
        self._instances = [
            Instance(generator_id=f"{place:03}", slots=SPARE * SAMPLES // instances, curve=CURVE)
            for place in range(instances)
        ]
        self.work = Work(
            trusted=lengths.trusted,
            groups=[
                Candidate(group_id=place, wave=0, place=place, predicted_tokens=predicted.tokens)
                for place in range(SAMPLES)
                for predicted in [lengths.predict(prompt_key(str(place)), prompt=str(place))]
            ],
            instances=self._instances,
            rank_correlation=rank_correlation_lower(quality.rank_correlation, pairs=quality.pairs),
        )
        self._ranked = [self._tokens[group.group_id] for group in sorted(self.work.groups, key=lambda one: one.rank)]
        shuffled = [self._tokens[:] for _ in range(BASE_DEALS)]
        for tokens in shuffled:
            chance.shuffle(tokens)
        self._base_s = fmean(self._side(tokens, instances) for tokens in shuffled)

    @property
    def bound(self) -> float:
        """No order and no placement is faster."""
        return bound_seconds(self._tokens, self._instances, samples=1) / self._base_s

    def planned(self, plan: Plan) -> float:
        """The plan's makespan."""
        groups = sorted(self.work.groups, key=plan.key)
        tail, rest = (
            [self._tokens[group.group_id] for group in groups if plan.is_tail(group) is side] for side in (True, False)
        )
        return self._sides(tail, rest, instances=len(plan.tail_generators))

    def split(self, split: Split) -> float:
        """The makespan with q of the longest predicted on m instances."""
        return self._sides(self._ranked[: split[0]], self._ranked[split[0] :], instances=split[1])

    def _sides(self, tail: Sequence[float], rest: Sequence[float], *, instances: int) -> float:
        others = len(self._instances) - instances
        return max(self._side(tail, instances), self._side(rest, others)) / self._base_s

    def _side(self, tokens: Sequence[float], instances: int) -> float:
        """One after the other to the emptiest; those that find no slot take the ones that free."""
        side = self._instances[:instances]
        return list_seconds(tokens, Pace(side), places=dealt(len(tokens), side))


def rows(*, instances: int, recall: float, draws: int) -> Iterator[tuple[str, list[float], str]]:
    """Name, makespans as shares of the base, remark."""
    batches = [Batch(instances=instances, recall=recall, seed=seed) for seed in range(draws)]
    yield "lower bound", [batch.bound for batch in batches], ""
    for name, policy in POLICIES.items():
        yield name, [batch.planned(policy.plan(batch.work, previous=IN_ORDER)) for batch in batches], ""
    splits = [(tail, count) for tail in TAILS for count in range(1, instances)]
    found = {split: [batch.split(split) for batch in batches] for split in splits}
    best = min(splits, key=lambda split: fmean(found[split]))
    yield "one split for all draws", found[best], f" ({best[0]} on {best[1]})"
    yield "each draw's own split", [min(column) for column in zip(*found.values(), strict=True)], ""


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--instances", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--recalls", type=float, nargs="+", default=[0.87, 0.75, 1.0])
    args = parser.parse_args()
    kinds = [(instances, recall) for instances in args.instances for recall in args.recalls]
    columns = [list(rows(instances=instances, recall=recall, draws=args.draws)) for instances, recall in kinds]
    heads = [
        f"{instances} instances, {'oracle' if recall >= 1 else f'recall {recall:g}'}" for instances, recall in kinds
    ]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for line in zip(*columns, strict=True):
        cells = [f"{fmean(values):.3f} ± {stdev(values):.3f}{remark}" for _, values, remark in line]
        print(f"| {line[0][0]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
