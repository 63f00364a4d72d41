#!/usr/bin/env bash
# Puts the parts of bundle.py, all in DIR, together into TARGET; then: export PYTHONPATH=TARGET SGLANG_ENABLE_JIT_DEEPGEMM=0
set -euo pipefail
parts=${1:?usage: install.sh DIR TARGET}; target=${2:?usage: install.sh DIR TARGET}
scratch=$(mktemp -d "$(dirname "$target")/sglang.XXXX"); trap 'rm -rf "$scratch"' EXIT
cat "$parts"/sglang.tar.xz.* >"$scratch/all.tar.xz"
python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$scratch/all.tar.xz" "$scratch"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$target" "$scratch"/wheels/*.whl
cp -a "$scratch"/kernels/. "$target"/
