"""Warnings about a job that is valid: what it says may start, and most likely says something else than was meant.

Shown by `validate`, `plan` and the condition `SpecWarnings`. Nothing is refused for them.
"""

from collections.abc import Iterator

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec, vllm_arguments
from streamrl.spec.generators import GeneratorPool, VllmEngineSpec
from streamrl.spec.gpus import GPU, gpus, gpus_of_any_maker
from streamrl.spec.parse import nearest
from streamrl.spec.pod import Pod
from streamrl.spec.training import Trainer

USUAL_NODE_GPUS = 8
"""GPUs of the largest common node."""
_PIPELINE = "pipeline_parallel_size"
"""vLLM's argument for the stages of a pipeline, each on devices of its own."""


def spec_warnings(spec: RLJobSpec) -> list[UserError]:
    """Find what most likely was meant otherwise."""
    pools = [
        warning
        for index, pool in enumerate(spec.generators)
        for warning in _of_pool(pool, spec=spec, at=f"spec.generators[{index}]")
    ]
    return [*pools, *_of_trainer(spec.trainer)]


def _of_pool(pool: GeneratorPool, *, spec: RLJobSpec, at: str) -> Iterator[UserError]:
    engine, limits = pool.engine.common, f"{at}.pod.resources.limits"
    if isinstance(engine, VllmEngineSpec):
        yield from _of_vllm(engine, at=f"{at}.engine.vllm", has_device=_has_device(pool.pod), limits=limits)
        yield from _few_gpus(engine, pod=pool.pod, limits=limits)
        if any("parallel" in name for name in engine.extra_args):
            return  # how many devices those ask for, vLLM alone knows
    if engine.needs_model:
        yield from _slow_engine(pool, spec=spec, at=at)
        yield from _idle_gpus(
            pool.pod, used=engine.devices, field=limits, by=engine.devices_field or f"engine {pool.engine.key}"
        )


def _slow_engine(pool: GeneratorPool, *, spec: RLJobSpec, at: str) -> Iterator[UserError]:
    """Warn of an engine without kernels for GPUs, unless the job needs what only that engine has."""
    engine = pool.engine.common
    is_needed = (
        pool is spec.frozen_pool
        or pool.name in spec.lent_pools
        or spec.trainer.sherl is not None
        or engine.computes_alone
    )
    if _has_device(pool.pod) and not engine.has_gpu_kernels and not is_needed:
        yield UserError(
            field=f"{at}.engine",
            rule=f"is {pool.engine.key} on a GPU, without CUDA graphs and paged attention: most of the GPU idles",
            fix="take engine vllm if it supports the model",
        )


def _few_gpus(engine: VllmEngineSpec, *, pod: Pod, limits: str) -> Iterator[UserError]:
    """Warn of more devices than GPUs, where no rule refuses them: stages of a pipeline, and GPUs of other makers."""
    stages = engine.extra_args.get(_PIPELINE, "1")
    needed = engine.devices * (int(stages) if stages.isdecimal() else 1)
    there = gpus_of_any_maker(pod.resources.limits)
    if 0 < there < needed and not pod.resource_claims:
        by = "tensorParallelSize" + (f" times {_PIPELINE}" if needed > engine.devices else "")
        yield UserError(
            field=limits, rule=f"name {there} of {needed} GPUs that {by} takes", fix=f"raise it to {needed}"
        )


def _of_vllm(engine: VllmEngineSpec, *, at: str, has_device: bool, limits: str) -> Iterator[UserError]:
    if not has_device:
        yield UserError(
            field=limits,
            rule="name no GPU, so on Kubernetes only an image with vLLM's CPU build starts",
            fix=f"add {GPU}: {engine.devices}, here or in the namespace's RLJobDefaults",
        )
    if engine.devices > USUAL_NODE_GPUS:
        yield UserError(
            field=f"{at}.tensorParallelSize",
            rule=f"needs a node with {engine.devices} GPUs: a generator is one pod, on one node",
            fix=f"lower it to {USUAL_NODE_GPUS} if your nodes have no more",
        )
    for name in engine.extra_args:
        if name not in vllm_arguments.KNOWN:
            yield UserError(
                field=f"{at}.extraArgs.{name}",
                rule=f"is no argument of vLLM {vllm_arguments.RELEASE}; generators end with an error unless the image's vLLM knows it",
                fix=nearest(name, vllm_arguments.KNOWN) or "leave it out",
            )


def _of_trainer(trainer: Trainer) -> Iterator[UserError]:
    if trainer.engine.common.needs_model:
        field = "spec.trainer.pod.resources.limits"
        yield from _idle_gpus(trainer.pod, used=trainer.processes_per_node, field=field, by="processesPerNode")
        if trainer.number_format == "FP32" and trainer.precision != "TF32" and _has_device(trainer.pod):
            yield UserError(
                field="spec.trainer.precision",
                rule="is FP32 on a GPU: slower passes, and twice the bytes of each version and of its keys and values",
                fix="set BF16 if the GPU has it",
            )


def _has_device(pod: Pod) -> bool:
    """Whether a device plug-in or a claim may bring the container a GPU, whoever makes it."""
    return bool(pod.resource_claims) or any(
        "/" in name and amount != "0" for name, amount in pod.resources.limits.items()
    )


def _idle_gpus(pod: Pod, *, used: int, field: str, by: str) -> Iterator[UserError]:
    if gpus(pod) > used:
        yield UserError(
            field=field, rule=f"name {gpus(pod)} of {GPU}, and {by} takes {used}", fix=f"lower it to {used}"
        )
