#!/usr/bin/env bash
# Installs the base package alone, with no extra, and uses what it promises: the contract, `validate`, `explain`.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="${UV:-uv}"
python="${PYTHON:-python}"
room="$(mktemp -d)"
trap 'rm -rf "$room"' EXIT
"$uv" venv --quiet --python "$python" "$room/venv"
"$uv" pip install --quiet --python "$room/venv/bin/python" --constraint constraints.txt .
for heavy in torch transformers numpy grpc blake3 kopf starlette uvicorn vllm; do
    if "$room/venv/bin/python" -c "import $heavy" 2>/dev/null; then
        echo "the base package brings $heavy" >&2
        exit 1
    fi
done
"$room/venv/bin/streamrl" validate --spec-only tests/corpus/good/everything.yaml
"$room/venv/bin/streamrl" explain spec.pipeline.steps >/dev/null
"$room/venv/bin/python" -c "import streamrl.proto.stream_pb2, streamrl.status"
