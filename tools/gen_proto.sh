#!/usr/bin/env bash
# Generates the protocol messages from the .proto file.
# Usage: gen_proto.sh [ROOT]   the tree that is written to; absent = this one
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-.}"
mkdir -p "$root/crds/streamrl/proto"
"${PYTHON:-python}" -m grpc_tools.protoc -I crds --python_out="$root/crds" --pyi_out="$root/crds" crds/streamrl/proto/stream.proto
