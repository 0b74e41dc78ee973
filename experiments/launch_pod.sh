#!/usr/bin/env bash
# Start one training run on every host of a Cloud TPU pod slice:
#
#   bash experiments/launch_pod.sh NAME ZONE PRESET [OPTIONS of `python -m experiments.run train`]
#   bash experiments/launch_pod.sh my-v5e-64 us-west4-a smollm2_dspark --out /mnt/bucket/run --mesh 8 8 1 --batch-size 512 --micro-batches 8
#
# All hosts execute the same command; jax finds out by itself which host it is on. The run's folder (--out) and the data must be on a
# file system that all of them see, such as a mounted bucket: every host writes its own part of a checkpoint there. The same
# command again goes on from the newest checkpoint, and so does a run that was preempted (SIGTERM saves before it ends).
#
# DSPARK_DIR is where the repository lies on the hosts (default ~/dspark_jax), installed there once with
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker all --command 'cd dspark_jax && python3 -m venv .venv && .venv/bin/pip install uv && .venv/bin/uv pip install -e ".[tpu,models,plots,data]"'
#
# Elsewhere, start the same command once per host:
#   SLURM (one task per host):  srun --ntasks-per-node 1 .venv/bin/python -m experiments.run train PRESET --multi-host
#   plain ssh, on host I of N:  .venv/bin/python -m experiments.run train PRESET --coordinator HOST0:8476 --num-hosts N --host I
# Many runs on machines that work alone are a sweep: experiments/launch_sweep.sh.
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '2,5p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
  exit 2
fi
name=$1 zone=$2
shift 2

# Quoted once more, since the command goes through a shell on the hosts.
printf -v arguments ' %q' "$@"
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all \
  --command "cd ${DSPARK_DIR:-dspark_jax} && exec .venv/bin/python -m experiments.run train --multi-host${arguments}"
