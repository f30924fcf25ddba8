#!/usr/bin/env bash
# Resolves requirements/*.in into full pins. dev.txt holds only what cpu.txt lacks.
set -euo pipefail
cd "$(dirname "$0")/../requirements"
command -v uv >/dev/null || {
    echo "make lock: error: uv is not on PATH; install it (https://docs.astral.sh/uv/)" >&2
    exit 1
}
compile=(uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --no-emit-find-links --no-emit-index-url)
# Built for CUDA in the registry: they break beside a CPU build of torch, and text models need none.
"${compile[@]}" cpu.in -o cpu.txt --no-emit-package torchvision --no-emit-package torchaudio \
    --no-emit-package torchcodec --no-emit-package triton
"${compile[@]}" gpu.in -o gpu.txt
unfinished=$(mktemp)
trap 'rm -f "$unfinished"' EXIT
"${compile[@]}" dev.in -o "$unfinished" --no-emit-package torchvision --no-emit-package torchaudio \
    --no-emit-package torchcodec --no-emit-package triton
grep -vxFf cpu.txt "$unfinished" >dev.txt
