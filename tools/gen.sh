#!/usr/bin/env bash
# Generates everything that is generated. Usage: gen.sh [ROOT]   the tree that is written to; absent = this one
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-.}"
export PYTHON="${PYTHON:-python}"
mkdir -p "$root/crds" "$root/docs/reference" "$root/helm/streamrl"
tools/gen_proto.sh "$root"
"$PYTHON" tools/gen_crd.py "$root/crds"
"$PYTHON" tools/gen_reference.py "$root/docs/reference/rljob.md"
"$PYTHON" tools/gen_metrics.py "$root/docs/reference/metrics.md"
"$PYTHON" tools/gen_reasons.py "$root/docs/reference/reasons.md"
"$PYTHON" tools/gen_commands.py "$root/docs/reference/commands.md"
"$PYTHON" tools/gen_scenario.py "$root/docs/reference/scenario.md"
"$PYTHON" tools/gen_steps.py "$root/docs/reference/steps.md"
"$PYTHON" tools/gen_models.py "$root/docs/reference/models.md"
"$PYTHON" tools/gen_memory.py "$root/docs/reference/memory.md"
"$PYTHON" tools/gen_chart.py "$root/crds" "$root/helm/streamrl"
"$PYTHON" tools/gen_dashboards.py "$root/helm/streamrl/files/dashboards"
