#!/usr/bin/env bash
# Builds the images with buildah or docker, whichever is there, and looks at what it built.
# Usage: images.sh [build|check]... [operator|generator|trainer]...   absent = build and check all
#
#   BUILDER        buildah | docker                            absent = the first that works
#   BASE_IMAGE     absent = that of the Dockerfiles
#   IMAGE_PREFIX   repository before the name                  absent = localhost/streamrl
#   IMAGE_TAG      absent = the version of the package
#   RELEASE        1 = everything by digest or hash: BASE_IMAGE must have one, TORCH_BACKEND must not be given; writes dist/streamrl-*.cdx.json
#   TORCH_BACKEND  cpu = the small CPU build of torch          absent = the package index's (CUDA)
#   VLLM           gpu | cpu = the generator with vLLM, or with its CPU build   absent = without
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, SSL_CERT_FILE, UV_HTTP_TIMEOUT, http(s)_proxy, no_proxy are handed to the build, not to the image.
set -euo pipefail
cd "$(dirname "$0")/.."

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' crds/streamrl/__init__.py)"
revision="$(git rev-parse HEAD 2>/dev/null || echo unknown)"
prefix="${IMAGE_PREFIX:-localhost/streamrl}"
tag="${IMAGE_TAG:-$version}"
# From outside of a container the chroot isolation needs least of the machine; the build uses the machine's network and certificates.
buildah_flags=(--isolation chroot --network host --volume /etc/ssl/certs:/etc/ssl/certs:ro)

builder() {
    if [ -n "${BUILDER:-}" ]; then
        echo "$BUILDER"
    elif command -v buildah >/dev/null; then
        echo buildah
    elif command -v docker >/dev/null && docker info >/dev/null 2>&1; then
        echo docker
    else
        echo "no builder: install buildah, or start docker" >&2
        return 1
    fi
}

build() {
    local args=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision") name
    [ -z "${BASE_IMAGE:-}" ] || args+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
    # By name alone: the value is taken from the environment, and is not in the list of processes.
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL SSL_CERT_FILE UV_HTTP_TIMEOUT TORCH_BACKEND VLLM http_proxy https_proxy no_proxy; do
        [ -z "${!name:-}" ] || args+=(--build-arg "$name")
    done
    case "$builder" in
    buildah) buildah bud --layers "${buildah_flags[@]}" "${args[@]}" --file "Dockerfile.$1" --tag "$prefix/$1:$tag" . ;;
    docker) docker build --network host "${args[@]}" --file "Dockerfile.$1" --tag "$prefix/$1:$tag" . ;;
    esac
}

# Runs a command in the image as its own user.
inside() {
    local image="$1" container status=0
    shift
    if [ "$builder" = docker ]; then
        docker run --rm --interactive --read-only --tmpfs /tmp --cap-drop ALL --entrypoint "" "$image" "$@"
        return
    fi
    container="$(buildah from --pull-never "$image")"
    buildah run --isolation chroot "$container" -- "$@" || status=$?
    buildah rm "$container" >/dev/null
    return "$status"
}

check() {
    local image="$prefix/$1:$tag" modules compiler=""
    case "$1" in
    operator) modules="streamrl_operator.main, streamrl_cli.ui.job_pages" ;;
    generator) modules="streamrl_workers.generator.main, torch, transformers" ;;
    trainer) modules="streamrl_workers.trainer.launch, streamrl_workers.models.prepare, streamrl_workers.scheduler.main, torch, transformers" ;;
    esac
    if [ "$1" = generator ] && [ -n "${VLLM:-}" ]; then
        modules+=", vllm"
        [ "$VLLM" = cpu ] || compiler="compiler"
    fi
    inside "$image" python -I - "$1" "$modules" ${compiler:+"$compiler"} <tools/check_image.py
}

case "${VLLM:-none}" in
none) unset VLLM ;; # the Dockerfile's own word for it is none at all
gpu | cpu) ;;
*)
    echo "images.sh: VLLM: must be none, gpu or cpu; got '$VLLM'" >&2
    exit 2
    ;;
esac
if [ "${VLLM:-}" = gpu ] && [ -n "${TORCH_BACKEND:-}" ]; then
    echo "images.sh: TORCH_BACKEND: must not be given with VLLM=gpu, which needs the torch of its lock; got '$TORCH_BACKEND'" >&2
    exit 2
fi

# What a release is made of can be made again: no name that means something else tomorrow.
if [ -n "${RELEASE:-}" ]; then
    if ! [[ "${BASE_IMAGE:-}" =~ @sha256:[0-9a-f]{64}$ ]]; then
        echo "images.sh: BASE_IMAGE: must end with @sha256:DIGEST in a release; got '${BASE_IMAGE:-}'" >&2
        exit 2
    fi
    if [ -n "${TORCH_BACKEND:-}" ]; then
        echo "images.sh: TORCH_BACKEND: must not be given in a release, since the lock has no hash of that torch; got '$TORCH_BACKEND'" >&2
        exit 2
    fi
fi

steps=() names=()
for word in "$@"; do
    case "$word" in
    build | check) steps+=("$word") ;;
    operator | generator | trainer) names+=("$word") ;;
    *)
        echo "images.sh: must be build, check, operator, generator or trainer; got '$word'" >&2
        exit 2
        ;;
    esac
done
[ ${#steps[@]} -gt 0 ] || steps=(build check)
[ ${#names[@]} -gt 0 ] || names=(operator generator trainer)
[ -z "${RELEASE:-}" ] || tools/sbom.sh "${names[@]}"
builder="$(builder)"
for name in "${names[@]}"; do
    for step in "${steps[@]}"; do
        echo "==> $step $prefix/$name:$tag"
        "$step" "$name"
    done
done
