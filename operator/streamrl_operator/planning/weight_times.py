"""Seconds that a version of the weights takes, part by part: what a plan says before anything ran, and a report beside what it measured.

    trainer      copy    rows that a rank holds, cast on the device, into pinned memory    V / (R copy)        the next step waits for it
                 publish the rank hashes its slices and makes deltas in the background     V / (R hash) ..     a step that ends before waits
    generation   pull    over the link, verified, while the engine generates               V / link            with staleness 0 it waits
                 pause   the decoding step under way                                        PTL(slots)          it stands still from here
                 copy    main memory to the devices of the replica                          L / (G copy)
                 load    on the devices, into the engine's own layout                       L / (G load)
                 cache   keys and values of running samples, computed under new weights     2 N t / (G flops)

V bytes of a version, L bytes that an engine loads, R ranks, G devices of a replica, N parameters that a token passes, t tokens of running
samples. Owns the formulas and what is assumed of hardware. Sizes are those of `estimate.py`, times of steps those of a profile. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.latency import LatencyCurve
from streamrl.spec import RLJob, RLJobSpec, parse_bytes
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.training import Trainer
from streamrl_operator.planning.estimate import PoolEstimate, ResourceEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRates:
    """What hardware is assumed to do, in bytes a second where nothing else is said."""

    pinned_copy: float = 25e9
    """Between a device and pinned memory. Assumed: 4/5 of PCIe 4.0 x16 (31.5 GB/s); 5.0 has twice that."""
    hash: float = 5.8e9
    """BLAKE3, one thread. Measured: docs/benchmarks/weights.md."""
    make_delta: float = 0.4e9
    """Of the whole tensor, one thread. Measured in bfloat16, the least: docs/benchmarks/weights.md; float32 has 0.3 to 0.4."""
    apply_delta: float = 0.7e9
    """The same of a generator. Measured in bfloat16, the least."""
    pull: float = 0.83e9
    """One generator, mutual TLS, verified, two processor cores. Measured: docs/benchmarks/weights.md."""
    write_folder: float = 0.2e9
    """One rank. Measured with a local directory: docs/benchmarks/weights.md."""
    read_folder: float = 0.12e9
    """One generator. Measured with a local directory."""
    lan: float = 1.25e9
    """Between pods of one cluster. Assumed: 10 Gbit/s."""
    device_load: float = 1e12
    """Within a device. Assumed: a third of an H100's 3.35 TB/s, as each byte is read and written."""
    flops: float = 4e14
    """Floating-point operations a second of a device that reads prompts. Assumed: 2/5 of an H100's 989e12 in bfloat16."""
    decoding_step_s: float = 0.05
    """Seconds of one decoding step. Assumed; a profile has it."""
    delta_share: Mapping[str, float] = field(default_factory=lambda: {"BF16": 0.05, "FP32": 0.47})
    """Precision -> bytes of a version's deltas over those of the version. Measured with a learning rate of 1e-5: docs/benchmarks/weights.md."""


RATES = WeightRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPool:
    """What a profile says of one generator."""

    curve: LatencyCurve
    fill_s: float
    """The batch waits so long while one sample is admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTimes:
    """Deltas from the version before, beside the whole."""

    size_bytes: float
    make_s: float
    """Of a rank, before the version is announced."""
    apply_s: float
    """Of a generator, after its pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTimes:
    """One version, one generator."""

    name: str
    cluster: str
    """Empty: the trainer's."""
    bytes_per_s: float
    """Of its link."""
    whole_s: float
    """Pull of the whole version."""
    pull_s: float
    """The same, by deltas where the job has them, applied."""
    pause_s: float
    copy_s: float
    load_s: float
    cache_s: float

    @property
    def stall_s(self) -> float:
        """Generation stands still so long for a version that has come."""
        return self.pause_s + self.copy_s + self.load_s + self.cache_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTimes:
    """One version, all processes."""

    version_bytes: int
    ranks: int
    """That publish a part each: those of one replica."""
    copy_s: float
    publish_s: float
    """From the end of the copy until the version can be announced."""
    deltas: DeltaTimes | None
    pools: tuple[PoolTimes, ...]
    waits_for_pull: bool
    """With staleness 0 no sample begins before the version of its step has come."""

    def trainer_stall_s(self, *, step_s: float) -> float:
        """Stall of the trainer for a version, if a step takes so long without it."""
        return self.copy_s + max(0.0, self.publish_s - step_s)

    def stall_s(self, pool: PoolTimes) -> float:
        """Stall of a pool's generators for a version."""
        return pool.stall_s + (self.copy_s + self.publish_s + pool.pull_s if self.waits_for_pull else 0.0)


def weight_times(
    job: RLJob,
    *,
    known: ResourceEstimate,
    rates: WeightRates = RATES,
    measured: Mapping[str, MeasuredPool] | None = None,
) -> WeightTimes | None:
    """Estimate the times of one version; None: there is no model, or its size is not known.

    Args:
        job: the job.
        known: its `estimate`.
        rates: of the hardware.
        measured: by pool, in the place of what is assumed.
    """
    size_bytes, spec = known.version_bytes, job.spec
    if known.simulated or size_bytes is None:
        return None
    deltas = _deltas(spec, size_bytes=size_bytes, rates=rates)
    share_bytes = size_bytes / known.replica_ranks
    written_s = share_bytes / rates.write_folder if spec.weights.folder is not None else 0.0
    pools = zip(spec.generators, known.pools, strict=True)
    return WeightTimes(
        version_bytes=size_bytes,
        ranks=known.replica_ranks,
        copy_s=share_bytes / rates.pinned_copy,
        publish_s=share_bytes / rates.hash + written_s + (0.0 if deltas is None else deltas.make_s),
        deltas=deltas,
        pools=tuple(
            _pool(
                spec,
                pool,
                sizes=sizes,
                known=known,
                deltas=deltas,
                rates=rates,
                measured=(measured or {}).get(pool.name),
            )
            for pool, sizes in pools
            if pool is not spec.frozen_pool
        ),
        waits_for_pull=spec.pipeline.staleness == 0,
    )


def link_bounds(spec: RLJobSpec) -> list[float]:
    """Return what the job lets the trainer send to another cluster, in bytes a second; empty: no bound."""
    http = spec.weights.http
    given = () if http is None else (http.remote_bytes_per_second, http.uplink_bytes_per_second)
    return [float(parse_bytes(bound)) for bound in given if bound]


def _deltas(spec: RLJobSpec, *, size_bytes: int, rates: WeightRates) -> DeltaTimes | None:
    if not spec.weights.has_deltas:
        return None
    return DeltaTimes(
        size_bytes=size_bytes * rates.delta_share[spec.trainer.number_format],
        make_s=size_bytes / spec.trainer.replica_ranks / rates.make_delta,
        apply_s=size_bytes / rates.apply_delta,
    )


def _pool(
    spec: RLJobSpec,
    pool: GeneratorPool,
    *,
    sizes: PoolEstimate,
    known: ResourceEstimate,
    deltas: DeltaTimes | None,
    rates: WeightRates,
    measured: MeasuredPool | None,
) -> PoolTimes:
    size_bytes, cluster, engine = known.version_bytes, spec.cluster_apart(pool), pool.engine.value
    assert size_bytes is not None and known.active_parameters is not None and sizes.cache_tokens is not None
    own = rates.pull if spec.weights.folder is None else rates.read_folder
    link = min([own, *(link_bounds(spec) if cluster else [rates.lan])])
    devices = pool.engine.common.devices
    loaded_bytes = size_bytes if _only_adapters(spec.trainer) else known.model_bytes
    tokens = sizes.cache_tokens / 2  # a running sample has half of its tokens, in the mean
    if measured is None:
        pause_s = rates.decoding_step_s
        cache_s = 2 * known.active_parameters * tokens / (devices * rates.flops)
    else:
        pause_s, cache_s = measured.curve.at(engine.slots), measured.fill_s * engine.slots
    whole_s = size_bytes / link
    return PoolTimes(
        name=pool.name,
        cluster=cluster,
        bytes_per_s=link,
        whole_s=whole_s,
        pull_s=whole_s if deltas is None else deltas.size_bytes / link + deltas.apply_s,
        pause_s=pause_s,
        copy_s=loaded_bytes / devices / rates.pinned_copy,
        load_s=loaded_bytes / devices / rates.device_load,
        cache_s=cache_s,
    )


def _only_adapters(trainer: Trainer) -> bool:
    """Return whether an engine loads nothing of a version but its adapters."""
    return trainer.unmerged_lora is not None
