#!/usr/bin/env bash
# Writes a software bill of materials for each image: CycloneDX, validated, from the locked requirements that the image is made of.
# Usage: sbom.sh [operator|generator|trainer]...   absent = all      SBOM_DIR absent = dist      VLLM = as in images.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}" into="${SBOM_DIR:-dist}"

[ $# -gt 0 ] || set -- operator generator trainer
mkdir -p "$into"
for name in "$@"; do
    case "$name" in
    operator) lock=operator ;;
    generator)
        case "${VLLM:-none}" in
        gpu | cpu) lock="vllm-$VLLM" ;;
        *) lock=worker ;;
        esac
        ;;
    trainer) lock=worker ;;
    *)
        echo "sbom.sh: must be operator, generator or trainer; got '$name'" >&2
        exit 2
        ;;
    esac
    "$python" -W ignore -m cyclonedx_py requirements "requirements/$lock.txt" --pyproject pyproject.toml \
        --output-reproducible --validate --of JSON --output-file "$into/streamrl-$name.cdx.json"
done
