#!/usr/bin/env bash
# The kernels on one NVIDIA GPU: parity with plain JAX, and time against the memory floor and against plain formulations.
# Under 8 minutes on an H200. From the repository's root, in an environment with the extra `cuda`:
#
#   bash experiments/gpu_check.sh [folder for the results]        # default: experiments/results/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-experiments/results/gpu}"
mkdir -p "$out"
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-out/compilation_cache}"
python -c 'import jax; device = jax.devices()[0]; assert device.platform == "gpu", device; print(device.device_kind, jax.__version__)' | tee "$out/device.txt"
date -u +%Y-%m-%d | tee -a "$out/device.txt"
python -m pallas_kernels.parity --backend triton 2>&1 | tee "$out/parity.txt"
python -m pallas_kernels.bench --backend triton --gib 60 --out "$out/kernels.json" 2>&1 | tee "$out/bench.txt"
if python -c 'import torch' 2> /dev/null; then
  python experiments/torch_rejection.py --out "$out/torch.json" 2>&1 | tee "$out/torch.txt"
else
  echo "PyTorch is not here: the comparison with it was left out" | tee "$out/torch.txt"
fi
