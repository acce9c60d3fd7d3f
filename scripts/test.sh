#!/usr/bin/env bash
# Sets up what is missing, then checks style, types and tests.
#
#   bash scripts/test.sh                 what CI runs
#   bash scripts/test.sh --slow          only the tests that take minutes or gigabytes
#   bash scripts/test.sh --newest        on the newest Python found, and so the newest JAX, in an environment of its own
#   bash scripts/test.sh tests/graph -k scan    any other arguments are pytest's
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_env.sh

venv=.venv which="" extras="[test]" named=0 pytest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --slow) named=1 pytest+=(-m slow) ;;  # one at a time: some measure time
    --newest) venv=.venv-newest which=newest ;;
    *) named=1 pytest+=("$1") ;;
  esac
  shift
done

make_environment "$venv" "$extras" $which
python="$venv/bin/python"
"$python" -c 'import jax, sys; print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}")'
"$python" -m ruff check .
"$python" -m mypy zinf_jax aio_ffi
# Two files at a time: most of a test is compiling or waiting for the disk.
[ "$named" = 1 ] || pytest+=(-n 2 --dist loadfile)
"$python" -m pytest "${pytest[@]}"
