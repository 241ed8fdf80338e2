"""Pages for Prometheus, read."""

import math
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from streamrl.metrics import MetricTable


def families(page: bytes) -> dict[str, Metric]:
    """By name, that of a counter with `_total`."""
    found = text_string_to_metric_families(page.decode())
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


def series(page: bytes, name: str, **labels: str) -> float:
    """The one sample of that name that has these labels."""
    samples = (sample for one in families(page).values() for sample in one.samples)
    (value,) = (one.value for one in samples if one.name == name and labels.items() <= one.labels.items())
    return float(value)


def unset(page: bytes) -> set[str]:
    """Metrics without a value yet."""
    return {name for name, one in families(page).items() if all(math.isnan(sample.value) for sample in one.samples)}


def mistakes(page: bytes, table: MetricTable) -> Iterator[str]:
    """Where a page and the table of its process differ."""
    exported, specs = families(page), {spec.name: spec for spec in table.specs.values()}
    yield from (f"{name} is in no table" for name in exported.keys() - specs.keys())
    yield from (f"{name} is exported by nobody" for name in specs.keys() - exported.keys())
    for name, spec in specs.items():
        if name not in exported:
            continue
        if exported[name].type != spec.type:
            yield f"{name} is a {exported[name].type}"
        yield from (
            f"{sample.name} has the labels {sorted(sample.labels)}"
            for sample in exported[name].samples
            if set(sample.labels) - {"le"} != set(spec.labels)
        )
