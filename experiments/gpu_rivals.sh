#!/usr/bin/env bash
# All drafters for SmolLM2-135M on one GPU, at equal texts, anchors and steps: three seeds of DSpark and both DFlash, one of the others.
# Planned for 10 minutes on an H200 with 600 steps (2.5 million anchors) a drafter; not yet run. From the repository's root, in an
# environment with the extras `cuda`, `models` and `data`:
#
#   bash experiments/gpu_rivals.sh [folder of the results] [fields as for --set]     # default: experiments/results/gpu_rivals
#   DATA=out/carried STEPS=2773 bash experiments/gpu_rivals.sh out/rivals     # other texts, the whole schedule
#
# DATA holds smollm2_onpolicy_*.npz. The first seed of all drafters is trained first, so that a run that is cut short
# has them; the same command goes on with what is missing. Trained drafters stay in out/gpu_rivals.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to="${1:-experiments/results/gpu_rivals}"
shift || true
data="${DATA:-../shared/smollm2}" steps="${STEPS:-600}" platform="${PLATFORM:-gpu}" dtype="${DTYPE:-bfloat16}"
mkdir -p "$to" out/gpu_rivals
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-out/compilation_cache}" XLA_PYTHON_CLIENT_PREALLOCATE=false
python - "$platform" <<'CHECK' | tee "$to/device.txt"
import datetime, sys, jax
device = jax.devices()[0]
assert device.platform == sys.argv[1], device
print(device.device_kind, jax.__version__, datetime.date.today())
CHECK
files=$(printf '%s,' "$data"/smollm2_onpolicy_*.npz)
settings=(run.data="${files%,}" run.train.optimizer.total_steps="$steps" run.train.compute_dtype="$dtype" run.held_out_steps=)
sweep() { python -m experiments.run sweep smollm2_rivals --out out/gpu_rivals "$@" --here run.checkpoint_every=100000; }
sweep --seeds 0 --set "${settings[@]}" "$@"
sweep --seeds 1 2 --only drafter=dspark,dflash,no_heads --set "${settings[@]}" "$@"
cp out/gpu_rivals/smollm2_rivals.shard-*.jsonl "$to"
python -m experiments.rivals_report --sweep smollm2_rivals --seeds 0 1 2 --set "${settings[@]}" "$@" --records "$to"
