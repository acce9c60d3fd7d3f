#!/usr/bin/env bash
# Runs the C core of aio_ffi under sanitizers: a stress program under ASan+UBSan and under TSan, then, with --python,
# the Python tests of aio_ffi on a module built with ASan+UBSan. usage: scripts/sanitize.sh [--python] [SECONDS]
set -eu
cd "$(dirname "$0")/.."
python=0
if [ "${1:-}" = --python ]; then python=1; shift; fi
seconds=${1:-2}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources="aio_ffi/engine.c aio_ffi/rings.c aio_ffi/threads.c aio_ffi/file.c aio_ffi/checksum.c aio_ffi/faults.c"

for sanitizer in address,undefined thread; do
  gcc -std=gnu11 -g -O1 -Wall -Wextra -fno-omit-frame-pointer -fsanitize=$sanitizer -fno-sanitize-recover=all \
    -Iaio_ffi $sources tests/aio_ffi/stress.c -o "$work/stress" -pthread
  echo "== $sanitizer"
  # TSan does not see the kernel's writes to a buffer: what it checks is the queues and counters. Its runtime needs a
  # fixed address layout (newer kernels randomise more bits than it knows).
  setarch "$(uname -m)" -R env TSAN_OPTIONS=halt_on_error=1 "$work/stress" "$work/file" "$seconds"
done

if [ $python = 1 ]; then
  interpreter=${PYTHON:-.venv/bin/python}
  case $interpreter in */*) interpreter=$PWD/$interpreter ;; esac
  mkdir "$work/tree"
  cp -r aio_ffi tests scripts pyproject.toml "$work/tree"
  cd "$work/tree"
  rm -f aio_ffi/*.so aio_ffi/_aio.c
  CFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all" LDFLAGS="-fsanitize=address,undefined" \
    "$interpreter" aio_ffi/_build.py
  # The interpreter and numpy leave memory to the exit; only what touches memory wrongly is of interest.
  LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
    PYTHONPATH=. PYTHONMALLOC=malloc "$interpreter" -m pytest tests/aio_ffi -p no:cacheprovider \
    --deselect tests/aio_ffi/test_build.py --deselect tests/aio_ffi/test_sanitize.py -k "not fork and not cheap"
fi
