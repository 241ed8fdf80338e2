#!/usr/bin/env bash
# Generates the protocol messages (contract) and the gRPC stubs (workers) from the .proto file.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m grpc_tools.protoc -I crds --python_out=crds --pyi_out=crds --grpc_python_out=workers/streamrl_workers/stream crds/streamrl/proto/stream.proto
mv workers/streamrl_workers/stream/streamrl/proto/stream_pb2_grpc.py workers/streamrl_workers/stream/stream_pb2_grpc.py
rm -r workers/streamrl_workers/stream/streamrl
