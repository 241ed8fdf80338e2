"""Generation makespan of one batch at 20K as a share of random static FIFO, policy by policy, beside the paper's method.

    python benchmarks/dispatch_makespan.py                       # the tables of docs/benchmarks/scheduling.md
    python benchmarks/dispatch_makespan.py --slots 6 8 10 12     # for which slots Algorithm 2 reproduces Fig. 9

Regime (a): requests queue. (b): nothing queues. KV: slots by memory for the longest. The base deals samples to instances
beforehand and at random, each in its own order; everything else is the scheduler's core with the policy in it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, stdev
from typing import Any

from dispatch.draws import Group, draw, ranked, scores
from dispatch.models import BASE_DEALS, CURVE, MODELS, POPULATION, SAMPLES, UNIT, Model
from dispatch.world import Job, Pool, World

from streamrl.spec.scheduling import Dispatch
from streamrl_cli.simulation.lengths import correlation_of
from streamrl_workers.scheduler.dispatch.makespan import Instance, dealt, list_seconds, step_tables

PAST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row."""

    name: str
    dispatch: dict[str, dict[str, Any]]
    recall: float = 0.87
    """At 20 %; 1: an oracle."""
    inverted: bool = False
    guarded: bool = True


LONGEST: dict[str, dict[str, Any]] = {"longestFirst": {}}
CASES = (
    Case(name="fifo pull", dispatch={"fifo": {}}),
    Case(name="skewAware", dispatch={"skewAware": {}}),
    Case(name="skewAware, searched", dispatch={"skewAware": {"split": "Searched"}}),
    Case(name="longestFirst", dispatch=LONGEST),
    Case(name="auto", dispatch={"auto": {}}),
    Case(name="skewAware, recall .75", dispatch={"skewAware": {}}, recall=0.75),
    Case(name="longestFirst, recall .75", dispatch=LONGEST, recall=0.75),
    Case(name="auto, recall .75", dispatch={"auto": {}}, recall=0.75),
    Case(name="skewAware, oracle", dispatch={"skewAware": {}}, recall=1.0),
    Case(name="longestFirst, oracle", dispatch=LONGEST, recall=1.0),
    Case(name="auto, oracle", dispatch={"auto": {}}, recall=1.0),
    Case(name="skewAware, inverted, no guard", dispatch={"skewAware": {}}, recall=1.0, inverted=True, guarded=False),
    Case(name="longestFirst, inverted, no guard", dispatch=LONGEST, recall=1.0, inverted=True, guarded=False),
    Case(name="auto, inverted, no guard", dispatch={"auto": {}}, recall=1.0, inverted=True, guarded=False),
    Case(name="auto, inverted, guarded", dispatch={"auto": {}}, recall=1.0, inverted=True),
)
BOUND = "lower bound"


def shares(model: Model, *, slots: int, cases: Sequence[Case], seed: int) -> Iterator[tuple[str, float]]:
    """Each case's makespan as a share of the base, on one draw of lengths."""
    chance = Random(f"{model.name} {seed}")
    groups, past = (draw(POPULATION, groups=count, chance=chance) for count in (SAMPLES, PAST))
    base_s = mean(static_seconds(groups, model, slots=slots, chance=chance) for _ in range(BASE_DEALS))
    yield BOUND, bound_seconds([group.tokens[0] for group in groups], model, slots=slots) / base_s
    for case in cases:
        yield case.name, seconds(case, model, groups, past, slots=slots, seed=seed) / base_s


def bound_seconds(tokens: Sequence[int], model: Model, *, slots: int) -> float:
    """No order and no placement is faster: the longest sample alone on one instance, all tokens at full speed."""
    most_tokens_per_s = max(CURVE.tokens_per_s(batch) for batch in range(1, slots + 1))
    return max(max(tokens) * CURVE.at(1), sum(tokens) / (model.instances * most_tokens_per_s))


def static_seconds(groups: Sequence[Group], model: Model, *, slots: int, chance: Random) -> float:
    """The base: samples dealt beforehand at random, as many to each instance; each goes through its own in order."""
    tokens = [float(count) for group in groups for count in group.tokens]
    chance.shuffle(tokens)
    one = [Instance(generator_id="0", slots=slots, curve=CURVE)]
    own = (tokens[place :: model.instances] for place in range(model.instances))
    return max(list_seconds(part, step_tables(one), places=dealt(len(part), one)) for part in own)


def seconds(
    case: Case, model: Model, groups: Sequence[Group], past: Sequence[Group], *, slots: int, seed: int
) -> float:
    """One run of the core."""
    correlation = correlation_of(case.recall) * (-1 if case.inverted else 1)
    chance = Random(f"ranker {seed}")
    said, past_said = (scores(part, correlation=correlation, chance=chance) for part in (groups, past))
    lengths = ranked(said, past=past, past_said=past_said, unit=UNIT, guarded=case.guarded)
    dispatch = Dispatch.model_validate(case.dispatch)
    job = Job(
        pools=[Pool(name="p", replicas=model.instances, slots=slots, curve=CURVE)],
        batch_groups=SAMPLES,
        group_size=1,
        dispatch=dispatch.key,
        options=dispatch.value,
        unit=UNIT,
    )
    return World(job, tokens=[group.tokens for group in groups], lengths=lengths).run().seconds


def table(title: str, columns: Sequence[tuple[Model, int]], *, cases: Sequence[Case], seeds: int) -> None:
    """Markdown: mean and standard deviation over the seeds."""
    found: dict[str, list[list[float]]] = {}
    for place, (model, slots) in enumerate(columns):
        for seed in range(seeds):
            for name, share in shares(model, slots=slots, cases=cases, seed=seed):
                found.setdefault(name, [[] for _ in columns])[place].append(share)
    heads = [f"{model.name}, {model.instances} x {slots} slots" for model, slots in columns]
    print(f"\n{title}\n\n| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, values in found.items():
        print(f"| {name} | {' | '.join(_cell(column) for column in values)} |", flush=True)


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def main() -> None:
    """The tables, or the search for slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", help="look for the slots of regime (a) among these")
    parser.add_argument("--regimes", nargs="+", default=["a", "b", "kv"], choices=["a", "b", "kv"])
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    args = parser.parse_args()
    models = [model for model in MODELS if model.name in args.models]
    if args.slots:
        wanted = [case for case in CASES if case.name in {"skewAware", "skewAware, oracle"}]
        for model in models:
            title = f"Fig. 9 of {model.name}: {model.paper} with the ranker, {model.paper_oracle} with an oracle"
            table(title, [(model, slots) for slots in args.slots], cases=wanted, seeds=args.seeds)
        return
    regimes = {
        "a": ("(a) requests queue", [(model, model.queue_slots) for model in models]),
        "b": ("(b) nothing queues", [(model, model.all_slots) for model in models]),
        "kv": ("slots by KV memory", [(model, model.kv_slots) for model in models]),
    }
    for regime in args.regimes:
        title, columns = regimes[regime]
        table(title, columns, cases=CASES, seeds=args.seeds)


if __name__ == "__main__":
    main()
