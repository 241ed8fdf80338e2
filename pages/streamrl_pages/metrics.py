"""The metrics of one process, made from its table in the contract (`streamrl.metrics`).

Owns: that all of a table is there from the start, and nothing else. Does not own the values, nor how the page is served (`server.py`).

Invariants: a name or a label that the table does not have is an error of ours. A counter never falls while the process lives.
"""

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from streamrl.metrics import MetricSpec, MetricTable

Labels = tuple[str, ...]
"""Values of a metric's own labels, in the table's order."""


class MetricSet:
    """All metrics of a process."""

    def __init__(self, table: MetricTable, *, common: Mapping[str, str] | None = None) -> None:
        """`common`: values of labels that are the same on every series; a metric's own label of that name stands in their place."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # half of the page, and nobody looks at when a counter was made
        self._common = common or {}
        self._registry = CollectorRegistry()
        self._specs = table.specs
        self._metrics = {name: _create(spec, registry=self._registry) for name, spec in table.specs.items()}
        self._told: dict[tuple[str, Labels], float] = {}
        for name, spec in table.specs.items():
            if spec.by or any(label not in self._common for label in spec.labels):
                continue  # its writer knows the values
            self.begin(name)
            if spec.type == "gauge":
                self.set(name, None)

    def begin(self, name: str, *by: str) -> None:
        """Have a counter or histogram with these values of its own labels, with zeros."""
        self._child(name, by)

    def set(self, name: str, value: float | None, *by: str) -> None:
        """Set a gauge; None: it is not known."""
        self._child(name, by).set(math.nan if value is None else value)

    def add(self, name: str, value: float, *by: str) -> None:
        """Raise a counter."""
        self._child(name, by).inc(value)

    def total(self, name: str, total: float, *by: str) -> None:
        """Bring a counter up to a cumulative number; where that is less than before it stays."""
        before = self._told.get((name, by), 0.0)
        if total > before or (name, by) not in self._told:
            self._told[name, by] = max(total, before)
            self._child(name, by).inc(max(0.0, total - before))

    def observe(self, name: str, value: float, *by: str) -> None:
        """Count a value in a histogram."""
        self._child(name, by).observe(value)

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """All series of a gauge or counter, by the values of the labels that are not common; others are there no more."""
        self._metrics[name].clear()
        write = "set" if self._specs[name].type == "gauge" else "inc"
        for by, value in values.items():
            getattr(self._child(name, by), write)(value)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _child(self, name: str, by: Labels) -> Any:  # noqa: ANN401 - of the type that the table says
        spec, metric = self._specs[name], self._metrics[name]
        if not spec.labels:
            return metric
        own = [label for label in spec.labels if label in spec.by or label not in self._common]
        return metric.labels(**{**self._common, **dict(zip(own, by, strict=True))})


def _create(spec: MetricSpec, *, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if spec.type == "histogram":
        return Histogram(spec.name, spec.text, spec.labels, registry=registry, buckets=spec.buckets)
    kind = Counter if spec.type == "counter" else Gauge
    return kind(spec.name, spec.text, spec.labels, registry=registry)
