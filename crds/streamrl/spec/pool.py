"""The GeneratorPool: one pool of one job as an object of its own, so that `/scale` works on it.

The operator makes it from the RLJob and owns all of its spec but `replicas`, which has an owner of its own.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from streamrl.spec.base import SpecModel
from streamrl.spec.generators import PoolName
from streamrl.spec.rljob import JobName


class GeneratorPoolSpec(SpecModel):
    """What the pool is and how many replicas are asked for."""

    job_name: JobName = Field(description="The RLJob that it belongs to.")
    pool_name: PoolName = Field(description="Name of the pool in the job.")
    scaling: Annotated[str, StringConstraints(pattern=r"^(static|auto|external)$", max_length=8)] = Field(
        description="Who sets replicas: static (the job), auto (the operator), external (/scale)."
    )
    min_replicas: int = Field(default=1, ge=0, le=1024, description="Fewer are not made, whoever asks.")
    max_replicas: int = Field(default=1024, ge=1, le=1024, description="More are not made, whoever asks.")
    replicas: int = Field(default=1, ge=0, le=1024, description="Generator pods that are asked for.")
