#!/usr/bin/env bash
#SBATCH --job-name=megatron-r3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# One Slurm job for a run of the loop (docs/launch.md):
#
#   sbatch --nodes=3 --gpus-per-node=8 docker/launch/slurm.sh run.toml
#
# The first node samples and collects, the others train; with one node, that node does everything.
# All nodes must see the config and what it names. A job that is preempted, loses a node, or comes
# to the end of its time is queued again, and the same script goes on where the run was.
#   MEGATRON_R3  the command of this package (megatron-r3)
#   SRUN         more arguments of srun, e.g. --container-image=... --container-mounts=...
#   RESTARTS     how often a part that died is started again (3)
#   PARTS        what this job runs ("sampler collector trainer"): several jobs can share a run.
#                A job of the trainer alone trains on all its nodes. If the server runs elsewhere
#                ([sampler] command is empty), give "collector trainer".
#   SAMPLER_HOST the host of the sampler, for a collector whose job has no sampler
set -euo pipefail
config=$(realpath -- "${1:?usage: sbatch docker/launch/slurm.sh CONFIG.toml}")
cd "$(dirname "$config")" # where modules of yours are found: the reward, the training script
r3=${MEGATRON_R3:-megatron-r3}

read -ra parts <<<"${PARTS:-sampler collector trainer}"
has() { [[ " ${parts[*]} " == *" $1 "* ]]; }
for part in "${parts[@]}"; do
  [[ $part =~ ^(sampler|collector|trainer)$ ]] || { echo "error: PARTS: there is no part $part" >&2; exit 2; }
done

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${nodes[@]}")
if has sampler || has collector; then
  trainers=("${nodes[@]:1}")
  [ "${#trainers[@]}" -gt 0 ] || trainers=("${nodes[0]}")
fi

# torchrun reads these instead of options that it is not given. Each node adds its PET_NODE_RANK.
export PET_NNODES=${#trainers[@]} PET_MASTER_ADDR=${trainers[0]}
export PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node differ

step() { # PART COMMAND: run a shell command on each node of a part, in a step of the job
  local on=("${nodes[0]}")
  [ "$1" != trainer ] || on=("${trainers[@]}")
  # shellcheck disable=SC2086 # SRUN is several words
  srun --job-name "$1" --nodelist "$(IFS=,; echo "${on[*]}")" --nodes "${#on[@]}" --ntasks "${#on[@]}" \
    --overlap --cpu-bind=none --kill-on-bad-exit=1 ${SRUN:-} bash -c "$2"
}

keep() { # PART COMMAND: as `step`, and started again if it fails
  local try status=0
  for try in $(seq 0 "${RESTARTS:-3}"); do
    status=0
    echo "$1: start $try"
    step "$1" "$2" || status=$?
    [ "$status" != 0 ] || return 0
    echo "$1: ended with status $status" >&2
  done
  return "$status"
}

# Slurm sends USR1 to this script 120 s before the end of its time.
trap 'echo "queued again"; scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1

file=$(printf %q "$config")
listen="" # a sampler and a collector in one job share a node: 127.0.0.1 is enough
has collector || listen=" --host 0.0.0.0"
$r3 rl check "$config"
if has trainer; then trainer=$($r3 rl trainer "$config" --print); fi # the same at each start
if has sampler; then keep sampler "exec $r3 rl sampler $file$listen" & fi
if has collector; then
  keep collector "exec $r3 rl collector $file${SAMPLER_HOST:+ --host $SAMPLER_HOST}" &
fi
if has trainer; then keep trainer "export PET_NODE_RANK=\$SLURM_PROCID; exec $trainer" & fi
for _ in "${parts[@]}"; do
  status=0
  wait -n || status=$? # of the next part that ends; when this script ends, Slurm ends the other parts
  [ "$status" = 0 ] || { echo "error: a part of the run ended with status $status" >&2; exit "$status"; }
done
echo "$config: all parts of this job have ended"
