#!/usr/bin/env bash
# Generates the protocol messages (contract) and the gRPC stubs (workers) from the .proto file.
# Usage: gen_proto.sh [ROOT]   the tree that is written to; absent = this one
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-.}"
stubs="$root/workers/streamrl_workers/stream"
mkdir -p "$root/crds/streamrl/proto" "$stubs"
"${PYTHON:-python}" -m grpc_tools.protoc -I crds --python_out="$root/crds" --pyi_out="$root/crds" --grpc_python_out="$stubs" crds/streamrl/proto/stream.proto
mv "$stubs/streamrl/proto/stream_pb2_grpc.py" "$stubs/stream_pb2_grpc.py"
rm -r "$stubs/streamrl"
