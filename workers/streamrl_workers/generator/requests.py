"""From the protocol's requests to the engine's."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engine import Request, Sampling
from streamrl_workers.stream.packing import unpack_int32


def to_request(message: pb.SampleRequest) -> Request:
    """The engine's view of one issued sample; its lease is the request's id."""
    sampling = message.sampling
    return Request(
        request_id=message.lease,
        group_id=message.group_id,
        prompt=message.prompt,
        prefix_tokens=tuple(unpack_int32(message.prefix_tokens)),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.HasField("top_k") else None,
            max_tokens=sampling.max_tokens,
            stop=tuple(sampling.stop),
        ),
        seed=message.seed,
        pinned=message.pinned,
        context_tokens=message.context_tokens,
        observation=message.observation,
    )
