#!/usr/bin/env bash
# Run a sweep on a list of machines, each of which takes its own share of the cells:
#
#   bash experiments/launch_sweep.sh SWEEP HOST... [-- OPTIONS of `python -m experiments.run sweep`]
#   bash experiments/launch_sweep.sh small_rivals box-a box-b box-c -- --seeds 0 1 --here run.features=out/small_features
#
# HOST is anything that ssh reaches; the machines need not see each other or a common folder. Every one works through its cells on its
# own, shows its output with its name in front, and passes over what is finished when the same command is given again. Ctrl-C here ends
# all of them, and the same command goes on from their newest checkpoints. At the end the records (lines of JSON) are copied into
# out/sweeps here, where `.venv/bin/python -m experiments.run sweep-report SWEEP` joins them. Trained drafters stay where they are.
#
# DSPARK_DIR is where the repository lies on the machines (default dspark_jax in the home folder), with its .venv.
# A host of a TPU pod slice that is to work alone needs TPU_PROCESS_BOUNDS=1,1,1 and the bounds of its own chips in its environment.
set -euo pipefail

sweep=${1:-}
shift || true
hosts=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  hosts+=("$1")
  shift
done
[ $# -gt 0 ] && shift
if [ -z "$sweep" ] || [ ${#hosts[@]} -eq 0 ]; then
  sed -n '2,5p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
  exit 2
fi

directory=${DSPARK_DIR:-dspark_jax}
arguments=""
[ $# -gt 0 ] && printf -v arguments ' %q' "$@"
status=0
running=()
# A terminal on the other side (ssh -tt) ends what runs there when the connection does; jobs in the background do not hear Ctrl-C.
trap 'trap - INT TERM; kill 0' INT
for place in "${!hosts[@]}"; do
  host=${hosts[$place]}
  command="cd $directory && exec .venv/bin/python -m experiments.run sweep $(printf %q "$sweep") --shard $place/${#hosts[@]}$arguments"
  { ssh -tt "$host" "$command" </dev/null 2>&1 | sed -u "s/^/$host: /"; } &
  running+=($!)
done
for process in "${running[@]}"; do
  wait "$process" || status=1
done
mkdir -p out/sweeps
for host in "${hosts[@]}"; do
  scp -q "$host:$directory/out/sweeps/$sweep.shard-*.jsonl" out/sweeps/ || { echo "$host: no records of $sweep" >&2; status=1; }
done
exit $status
