"""The StreamRL contract: what users write and what the parts say to each other.

Owns the RLJob specification, the protocol messages, the names of environment variables and files,
and the error that users see. Depends on the standard library, pydantic and protobuf alone, so that
the operator, the workers and the command line can share it at no cost.
"""

__version__ = "0.1.0"

API_GROUP = "streamrl.io"
API_VERSION = f"{API_GROUP}/v1alpha1"
