#!/usr/bin/env bash
# Generates everything that is generated. Usage: gen.sh [ROOT]   the tree that is written to; absent = this one
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-.}"
export PYTHON="${PYTHON:-python}"
mkdir -p "$root/crds" "$root/docs/reference"
tools/gen_proto.sh "$root"
"$PYTHON" tools/gen_crd.py "$root/crds/streamrl.io_rljobs.yaml"
"$PYTHON" tools/gen_reference.py "$root/docs/reference/rljob.md"
