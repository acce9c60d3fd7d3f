#!/usr/bin/env bash
# Builds, tests and measures this project on a machine with an accelerator, without a network, in under 8 minutes.
#
#   bash scripts/gpu_check.sh                report in ./gpu_check.md and ./gpu_check.json ($OUT: another folder)
#   bash scripts/gpu_check.sh --allow-cpu    the same stages at a tiny size on a machine without one
#
# Needs Python >= 3.11 with JAX for CUDA, flax and optax, and gcc. Other packages that are missing (cffi, pydantic,
# gin-config ...) can lie as wheels in .whl/ (or $WHEELS): they are unpacked into a temporary folder, nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${OUT:-.}
wheels=${WHEELS:-.whl}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if compgen -G "$wheels/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  export PYTHONPATH="$PYTHONPATH:$site"
fi

# Not exec: the trap must run.
"$python" scripts/gpu_check.py --out "$out" "$@"
