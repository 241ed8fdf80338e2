"""The RLJob specification as pydantic models; `parse_job` is the door for untrusted input."""

from streamrl.spec.base import OneOf, SpecModel, parse_bytes
from streamrl.spec.parse import parse_job, read_job
from streamrl.spec.rljob import RLJob, RLJobSpec

__all__ = ["OneOf", "RLJob", "RLJobSpec", "SpecModel", "parse_bytes", "parse_job", "read_job"]
