#!/usr/bin/env bash
# Fails when a generated file is not what its generator writes now.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
tools/gen.sh "$fresh"
stale=0
while IFS= read -r -d '' file; do
    path="${file#"$fresh"/}"
    if ! cmp --silent "$file" "$path"; then
        echo "stale: $path (run \`make gen\` and commit it)" >&2
        stale=1
    fi
done < <(find "$fresh" -type f -print0)
exit "$stale"
