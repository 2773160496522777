#!/usr/bin/env bash
# The induced failures, or the jobs that recover from them, on one GPU, as one command.
#   OUT=DIR [PACKAGES=DIR:DIR] bench/gpu_session_induced.sh failures|jobs [OPTION …]
# OUT gets the record, what was recorded (one archive), and the log. PACKAGES: folders with unpacked packages.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?expected OUT, the folder for the results}"
what=${1:?expected failures or jobs}
shift
mkdir -p "$OUT"
scratch=$(mktemp -d)
keep_results() {
  cp "$scratch"/results/*.json "$OUT/" || true
  cp "$scratch"/results/recorded.tar.gz "$OUT/recorded_$what.tar.gz" || true
  rm -rf "$scratch"
}
trap keep_results EXIT

# A traceback tells a package's code by its path: .../site-packages/vllm/...
path=$PWD:$PWD/crds:$PWD/memory:$PWD/trainer
number=0
IFS=: read -ra folders <<<"${PACKAGES:-}"
for folder in "${folders[@]}"; do
  number=$((number + 1))
  mkdir -p "$scratch/$number"
  ln -s "$folder" "$scratch/$number/site-packages"
  path=$path:$scratch/$number/site-packages
done
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 OMP_NUM_THREADS=2

case $what in
failures)
  python3 -m bench.induced_failures --output "$scratch/results" "$@" 2>&1 | tee "$OUT/induced_failures.log" || true
  ;;
jobs)
  python3 -m bench.recovered_jobs --output "$scratch/results" "$@" 2>&1 | tee "$OUT/recovered_jobs.log" || true
  ;;
*)
  echo "expected failures or jobs, found $what" >&2
  exit 2
  ;;
esac
