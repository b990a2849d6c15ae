#!/usr/bin/env bash
#SBATCH --job-name=megatron-anchor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=2-00:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Any recipe as a Slurm job. Training runs on all nodes, the other steps on the first one:
#
#   sbatch examples/slurm.sh examples/llama_2_7b_64k.sh
#   ATTENTION=full sbatch --nodes 2 examples/slurm.sh examples/llama_2_7b_64k.sh train export
#
# All nodes must see the folders. A job that was stopped goes on where its last checkpoint stands.
set -euo pipefail
recipe=${1:?usage: sbatch examples/slurm.sh RECIPE [STEP ...]}
shift
NNODES=${SLURM_JOB_NUM_NODES:?this is no Slurm job: start it with sbatch}
if [[ $# -eq 0 ]]; then
    steps=$("$recipe" --steps) # a failing recipe ends the job here
    mapfile -t steps <<<"$steps"
    set -- "${steps[@]}"
fi
DRY_RUN=1 "$recipe" "$@" >/dev/null # a wrong step ends the job here, not after days of training

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes%%$'\n'*} # the first line
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
export NNODES MASTER_ADDR MASTER_PORT GPUS_PER_NODE

for step in "$@"; do
    if [[ $step == train ]]; then
        # shellcheck disable=SC2016  # each node's own shell knows its number
        srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit \
            bash -c 'NODE_RANK=$SLURM_NODEID exec "$1" train' recipe "$recipe"
    else
        "$recipe" "$step"
    fi
done
