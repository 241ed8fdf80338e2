"""Tables of what a version of the weights costs trainer and generators, part by part: estimated in a plan, measured in a report. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from streamrl.spec import RLJob
from streamrl_operator.planning.weight_times import RATES, PoolTimes, WeightTimes

HEAD = ("", "PULL", "PAUSE", "COPY", "LOAD", "CACHE", "WAIT", "STALL")
"""Of both tables. `PULL` goes on while the engine generates; `WAIT` is the trainer's, for the version before."""
UNKNOWN = ("a version: unknown bytes, as the model's config.json is not at hand, or of another kind",)
_NONE = "-"
_LEAST_S = 0.001


def estimated_rows(times: WeightTimes) -> list[tuple[str, ...]]:
    """Rows of the trainer and of each pool."""
    trainer = ("trainer", _NONE, _NONE, _seconds(times.copy_s), _NONE, _NONE, _NONE, _seconds(times.copy_s))
    return [trainer, *(_pool(pool, times=times) for pool in times.pools)]


def _pool(pool: PoolTimes, *, times: WeightTimes) -> tuple[str, ...]:
    where = f"pool {pool.name}" + (f" in cluster {pool.cluster}" if pool.cluster else "")
    parts = (pool.pull_s, pool.pause_s, pool.copy_s, pool.load_s, pool.cache_s)
    return where, *map(_seconds, parts), _NONE, _seconds(times.stall_s(pool))


def estimated_notes(times: WeightTimes) -> Iterator[str]:
    """What the table follows from."""
    share = times.version_bytes / times.ranks
    yield (
        f"a version: {_bytes(times.version_bytes)}, {_bytes(share)} of it from each of {times.ranks} ranks"
        if (times.ranks > 1)
        else f"a version: {_bytes(times.version_bytes)}"
    )
    yield f"it is announced {_seconds(times.publish_s)} s after its copy: a shorter step waits for the rest of that"
    if (deltas := times.deltas) is not None:
        ways = ", ".join(
            f"{pool.name} {_seconds(deltas.size_bytes / pool.bytes_per_s)} s on its link instead of {_seconds(pool.whole_s)}"
            for pool in times.pools
        )
        yield (
            f"deltas: about {_bytes(deltas.size_bytes)}, {_seconds(deltas.make_s)} s to make on each rank, "
            f"{_seconds(deltas.apply_s)} s to apply; {ways}"
        )
    if times.waits_for_pull:
        yield "with maxStalenessSteps 0 no sample begins before its version has come: a pool's stall has copy, announcement and pull in it"
    yield (
        f"assumed: {_bytes(RATES.pinned_copy)}/s into and out of pinned memory, {_bytes(RATES.lan)}/s between pods of a cluster, "
        f"{RATES.flops / 1e12:.0f} TFLOPS of a device for keys and values; measured on two cores: {_bytes(RATES.hash)}/s hashed, "
        f"{_bytes(RATES.pull)}/s pulled and verified"
    )


def measured_rows(steps: Sequence[Mapping[str, object]], *, job: RLJob) -> list[tuple[str, ...]]:
    """Rows of the trainer and of all generators, each a mean over the versions; nothing of what no line tells."""
    rows: list[tuple[str, ...]] = []
    trainer = [line for line in (_numbers(step.get("trainer")) for step in steps) if "weights_copy_seconds" in line]
    if trainer:
        copy_s, wait_s = (_mean([line.get(name, 0.0) for line in trainer]) for name in _TRAINER)
        parts = (_NONE, _NONE, _seconds(copy_s), _NONE, _NONE, _seconds(wait_s), _seconds(copy_s + wait_s))
        rows.append(("trainer", *parts))
    sums = [_numbers(step.get("weights")) for step in steps]
    total = {name: sum(line.get(name, 0.0) for line in sums) for name in ("loads", *_GENERATORS)}
    if count := total["loads"]:
        pull_s, pause_s, copy_s, load_s, cache_s = (total[name] / count for name in _GENERATORS)
        before_s = pull_s + copy_s if job.spec.pipeline.staleness == 0 else 0.0
        stall_s = before_s + pause_s + load_s + cache_s
        took = (pull_s, pause_s, copy_s, load_s, cache_s)
        rows.append(("generators", *map(_seconds, took), _NONE, _seconds(stall_s)))
    return rows


_TRAINER = ("weights_copy_seconds", "weights_wait_seconds")
_GENERATORS = ("pull_seconds", "pause_seconds", "copy_seconds", "load_seconds", "cache_seconds")


def _numbers(part: object) -> dict[str, float]:
    if not isinstance(part, Mapping):
        return {}
    return {str(name): float(value) for name, value in part.items() if isinstance(value, int | float)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _seconds(seconds: float) -> str:
    return "0" if seconds < _LEAST_S else f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"  # noqa: PLR2004 - three digits


def _bytes(size: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
