"""A generator's side of the weights: where they are pulled from, what is near, and what is passed on to other generators."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_bytes
from streamrl_workers.generator.settings import GeneratorSettings
from streamrl_workers.generator.status import GeneratorStatus
from streamrl_workers.weights.address import Route, WeightsError
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.hashing import TensorBytes, reserved
from streamrl_workers.weights.pull import Nearby, pull
from streamrl_workers.weights.puller import Pull
from streamrl_workers.weights.shared_memory import shared
from streamrl_workers.weights.source import Source
from streamrl_workers.weights.store import RelayStore
from streamrl_workers.weights.transports import TRANSPORTS, WeightServer


class GeneratorWeights:
    """Of one generator: its pull, its cache on disk, and its server for others."""

    def __init__(self, settings: GeneratorSettings, *, status: GeneratorStatus, instance: str) -> None:
        self._cache = _cache(settings, was_read=partial(status.weights_arrived, source="cache"), instance=instance)
        serves = settings.weights_port is not None and not settings.is_frozen
        serve = TRANSPORTS[settings.spec.weights.key].relay if serves else None
        relay = None if serve is None else RelayStore()
        self._server = None if serve is None or relay is None else _server(settings, relay, serve=serve)
        if (server := self._server) is not None:
            status.served_bytes = lambda: server.served_bytes
        nearby = Nearby(cache=self._cache, relay=relay, delta_used=status.delta_used, delta_failed=status.delta_failed)
        self.pull = pull_of(settings, arrived=status.weights_arrived, nearby=nearby, taken=status.weights_pull_times)
        self.address = "" if server is None else _reached_at(server, settings)
        """Where other generators get weights from this one; empty: nowhere."""

    async def close(self) -> None:
        """Give cache and server back."""
        if self._cache is not None:
            self._cache.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)


def pull_of(
    settings: GeneratorSettings,
    *,
    arrived: Callable[..., None],
    nearby: Nearby,
    taken: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> Pull:
    """How this job moves weights.

    `arrived` is called with all bytes that came over the network, and their `source`; `taken` with the seconds of each pull, by part.

    With deltas it holds the tensors of the version before; also where the trainer keeps a base, for that. Into a base in float32 adapters are
    merged, in a thread; beside one of fewer digits the engine computes them (`models/published.py`).
    The bytes come to lie where the engine's processes can read them.
    """
    transport, variables = settings.spec.weights, settings.variables
    trainer, real = settings.spec.trainer, settings.pool.engine.common.needs_model
    merges = real and trainer.lora is not None and trainer.unmerged_lora is None
    holds = (real and trainer.keeps_base) or transport.has_deltas

    def connect(target: pb.WeightsAvailable) -> Awaitable[Source]:
        whose = {"token": variables.token, "cluster": settings.cluster}
        if target.peer:
            return TRANSPORTS[transport.key].connect(target.address, role="generator", tls=variables.tls, **whose)
        address = settings.weights_address or target.address  # our way to it may be another one
        return TRANSPORTS[transport.key].connect(address, role="trainer", tls=settings.weights_tls, **whose)

    def told(target: pb.WeightsAvailable, size_bytes: int) -> None:
        arrived(size_bytes, source="peer" if target.peer else "trainer")

    async def pulled(route: Route) -> dict[str, TensorBytes]:
        tensors = await pull(
            route,
            timeout_s=transport.value.timeout_seconds,
            connect=connect,
            arrived=told,
            nearby=nearby,
            dials_ranks=not settings.weights_address,
            memory=shared if settings.pool.engine.common.own_processes else reserved,
        )
        taken(route.times.seconds())
        if not holds:
            nearby.held.clear()
        return await asyncio.to_thread(_merged, tensors) if merges else tensors

    return pulled


def _merged(tensors: dict[str, TensorBytes]) -> dict[str, TensorBytes]:
    from streamrl_workers.models.published import merged  # needs torch, which the engine has loaded

    try:
        return merged(tensors)
    except ValueError as error:
        raise WeightsError(f"the trainer's weights cannot be used: {error}") from error


def _server(settings: GeneratorSettings, relay: RelayStore, *, serve: Callable[..., WeightServer]) -> WeightServer:
    variables, port = settings.variables, settings.weights_port
    return serve(relay, token=variables.token, tls=variables.tls, host=variables.bind_host, port=port)


def _reached_at(server: WeightServer, settings: GeneratorSettings) -> str:
    host, _, port = server.address.rpartition(":")
    given = settings.pod_ip
    return f"{(f'[{given}]' if ':' in given else given) or host}:{port}"


def _cache(settings: GeneratorSettings, *, was_read: Callable[[int], None], instance: str) -> WeightCache | None:
    spec = settings.pool.weight_cache
    if spec is None:
        return None
    return WeightCache(Path(spec.path), most_bytes=parse_bytes(spec.max_bytes), name=instance, was_read=was_read)
