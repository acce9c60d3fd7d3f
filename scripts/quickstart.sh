#!/usr/bin/env bash
# Makes .venv, installs this package in it, and trains a 27M-parameter decoder on the standard library's sources with
# weights, gradients and optimizer state on disk, under runs/quickstart. Under 10 minutes on 2 cores, all told.
#
#   bash scripts/quickstart.sh                start, or go on with a run that was interrupted
#   bash scripts/quickstart.sh --overwrite    start anew
#   bash scripts/quickstart.sh --steps 400    go on up to this step; any other option of `zinf train` likewise
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_env.sh

make_environment .venv ""
# The CPU backend takes and gives back its buffers all the time: on huge pages, in one heap for all threads, that is fewer
# page faults.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1}"
case " $* " in
  *" --overwrite "*) how="" ;;
  *) how="--resume auto" ;;
esac
exec .venv/bin/zinf train configs/quickstart.yaml --run-dir runs/quickstart $how "$@"
