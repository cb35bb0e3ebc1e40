#!/usr/bin/env bash
# Writes images/locks/*.txt: what the images install, exact, with hashes. Needs uv. Run it after constraints.txt changed.
#   build.txt       what makes the wheel
#   operator.txt    the operator, no torch
#   server.txt      the server for GPUs: torch with its CUDA libraries
#   server-cpu.txt  the server for CPUs, without torch: its CPU build has a source of its own (see images/Dockerfile)
set -euo pipefail
cd "$(dirname "$0")/.."
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
# Triton comes with torch, in the version that torch names; the tests' own is newer.
grep -v '^triton==' constraints.txt > "$pins"
lock() {
  local name=$1
  shift
  uv pip compile pyproject.toml --quiet -c "$pins" --generate-hashes --no-header --no-annotate \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@" -o "images/locks/$name.txt"
}
mkdir -p images/locks
grep '^hatchling==' "$pins" | uv pip compile - --quiet --generate-hashes --no-header --no-annotate \
  --python-version 3.11 -o images/locks/build.txt
lock operator --extra operator
lock server --extra server --extra otel
gpu_only=$(grep -oE '^(torch|triton|nvidia[a-z0-9-]*|cuda[a-z0-9-]*)' images/locks/server.txt | sed 's/^/--no-emit-package=/')
# shellcheck disable=SC2086 # one option a word
lock server-cpu --extra server --extra otel $gpu_only
