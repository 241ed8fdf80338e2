"""How well a step used its devices: seconds by part, tokens and padding of the passes, model FLOPs against the device's peak.

Owns: clocks, counts, the table of peaks. Does not own: the passes (`worker.py`), how long ranks computed in all (`torch_engine.py`).

Model FLOPs are those of the policy's passes that train, as the field counts them (PaLM, appendix B): with n tokens of a sample, m of them
trained, B weights of the body, H of the head, L layers, h heads of size d:

    6 (B n + H m) + 12 L h d n^2        (4 for each weight that is frozen; of experts those that a token passes)

Embeddings that are only looked up, recomputed activations, the reference, the critic and padding are not counted: they lower the utilisation.

On a GPU parts are measured by CUDA events, which are read when the step is over: no pass waits for them. The collectives of shards run within
forward and backward, whose time has the share that is waited for.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from streamrl_workers.trainer.engines.packing import PackedSample

Part = Literal["data", "forward", "backward", "collectives", "optimiser"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "collectives", "optimiser")

_TERA = 1e12
_PEAKS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0},
    "H200": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 PCIe": {"bf16": 756.5, "tf32": 378.0, "fp32": 51.2},
    "H100 NVL": {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H100": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "L4": {"bf16": 121.0, "tf32": 60.0, "fp32": 30.3},
}
"""Dense TFLOP/s by a part of the device's name and the format of products, from NVIDIA's data sheets. The first name that matches counts."""


def peak_flops(device_name: str, *, product: str) -> float:
    """FLOP/s of a device; 0 if it is not in the table. `product`: `bf16`, `tf32` or `fp32`."""
    known = (peaks[product] for name, peaks in _PEAKS.items() if name in device_name)
    return _TERA * next(known, 0.0)


def device_peak(device: torch.device, *, precision: str) -> float:
    """FLOP/s of the device of a rank, in the format of its passes; 0 if it is not known."""
    if device.type != "cuda":
        return 0.0
    single = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return peak_flops(torch.cuda.get_device_name(device), product="bf16" if precision == "BF16" else single)


class ModelFlops:
    """What a pass of a model costs, by its weights and its configuration."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 1
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._attention = 12.0 * config.num_hidden_layers * heads * size
        ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call] # transformers'
        lookup, head = ({id(p) for p in end.parameters()} if end is not None else set() for end in ends)
        share = _active_share(config)
        self._body = self._head = 0.0
        for name, parameter in model.named_parameters():
            flops = (6.0 if parameter.requires_grad else 4.0) * parameter.numel()
            if id(parameter) in head:
                self._head += flops
            elif id(parameter) not in lookup:
                self._body += flops * (share if ".experts." in name else 1.0)

    def of(self, sample: PackedSample) -> float:
        """Forward and backward pass of a sample."""
        tokens = sample.inputs
        flops: float = self._body * tokens + self._head * sample.trained + self._attention * tokens * tokens
        return flops


def _active_share(config: Any) -> float:  # noqa: ANN401 - each model has its own class
    """Share of the experts that a token passes."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return float(chosen / experts) if experts and chosen else 1.0


class Throughput:
    """Counts and clocks of one rank since the step began."""

    def __init__(self, model: PreTrainedModel, *, device: torch.device, precision: str) -> None:
        self._flops_of = ModelFlops(model)
        self._device, self._precision = device, precision
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []
        self._flops = 0.0
        self._tokens = self._places = 0

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Measure a part; one that fails is not counted. `data` is the host's work."""
        if self._device.type == "cuda" and part != "data":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch's
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
            return
        begun_s = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - begun_s

    def add(self, samples: Sequence[PackedSample], *, places: int) -> None:
        """Count a pass that trained `samples` of the policy. `places`: tokens that it read, with padding."""
        self._tokens += sum(sample.inputs for sample in samples)
        self._places += places
        self._flops += sum(map(self._flops_of.of, samples))

    def raw(self) -> dict[str, float]:
        """The numbers that `throughput_metrics` takes; waits until the device has done what was measured."""
        for part, begin, end in self._events:
            end.synchronize()
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        self._events = []
        return {
            "tokens": float(self._tokens),
            "places": float(self._places),
            "flops": self._flops,
            "peak": device_peak(self._device, precision=self._precision),
            **{f"{part}_seconds": seconds for part, seconds in self._seconds.items()},
        }


def throughput_metrics(ranks: Sequence[Mapping[str, float]], *, busy_s: float, copies: int = 1) -> dict[str, float]:
    """The step's numbers from those of every rank. `busy_s`: time in which the ranks computed, with their waits for each other.

    `copies`: ranks that count the same samples.
    """
    sums = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    known = all(rank["peak"] for rank in ranks) and busy_s > 0
    return {
        "mfu": sums["flops"] / (copies * sums["peak"] * busy_s) if known else 0.0,
        "tokens_per_second": sums["tokens"] / (copies * busy_s) if busy_s > 0 else 0.0,
        "padding_share": max(0.0, 1.0 - sums["tokens"] / sums["places"]) if sums["places"] else 0.0,
        **{f"{part}_seconds": sums[f"{part}_seconds"] / len(ranks) for part in PARTS},
    }
