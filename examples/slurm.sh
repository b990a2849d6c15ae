#!/usr/bin/env bash
#SBATCH --job-name=megatron-anchor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=2-00:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Any recipe as a Slurm job. Training runs on all nodes, the other steps on the first one:
#
#   sbatch examples/slurm.sh examples/llama_2_7b_64k.sh
#   ATTENTION=full sbatch --nodes 2 examples/slurm.sh examples/llama_2_7b_64k.sh train export
#   CONTAINER=$PWD/anchor.sqsh sbatch examples/slurm.sh examples/llama_2_7b_64k.sh
#
# CONTAINER runs every step in this image, by Slurm's plugin pyxis (docs/containers.md): a squashfs file
# or REGISTRY#IMAGE:TAG. It sees this folder, and what CONTAINER_MOUNTS adds (SRC:DST,SRC:DST).
#
# All nodes must see the folders. Before Slurm ends the job (its time is up, or another one goes
# first) it sends SIGTERM: training then saves, and the job is queued again to go on from there.
# Saving has the 300 s above, and at a preemption the partition's GraceTime.
set -euo pipefail
trap : TERM # for the ranks; this shell waits for them
recipe=${1:?usage: sbatch examples/slurm.sh RECIPE [STEP ...]}
shift
NNODES=${SLURM_JOB_NUM_NODES:?this is no Slurm job: start it with sbatch}
UNFINISHED=75 # status of a recipe whose training was asked to stop
container=()
if [[ -n ${CONTAINER-} ]]; then
    mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    container=(--container-image "$CONTAINER" --container-mounts "$mounts")
    container+=(--container-workdir "$PWD" --no-container-mount-home)
fi
here() { # run a command on this node, in the container where there is one
    if ((${#container[@]})); then
        srun --nodes 1 --ntasks 1 "${container[@]}" "$@"
    else
        "$@"
    fi
}
if [[ $# -eq 0 ]]; then
    steps=$(here "$recipe" --steps) # a failing recipe ends the job here
    mapfile -t steps <<<"$steps"
    set -- "${steps[@]}"
fi
DRY_RUN=1 here "$recipe" "$@" >/dev/null # a wrong step ends the job here, not after days of training

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes%%$'\n'*} # the first line
[[ $SLURM_JOB_ID =~ ^[0-9]{1,18}$ ]] || exit 1
MASTER_PORT=${MASTER_PORT:-$((20000 + 10#$SLURM_JOB_ID % 10000))}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
SAVE_ON_TERM=${SAVE_ON_TERM:-1}
export NNODES MASTER_ADDR MASTER_PORT GPUS_PER_NODE SAVE_ON_TERM

for step in "$@"; do
    if [[ $step == train ]]; then
        status=0
        # shellcheck disable=SC2016  # each node's own shell knows its number
        srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit \
            ${container[@]+"${container[@]}"} \
            bash -c 'NODE_RANK=$SLURM_NODEID exec "$1" train' recipe "$recipe" || status=$?
        if ((status == UNFINISHED)); then
            scontrol requeue "$SLURM_JOB_ID"
            exit
        fi
        ((status == 0)) || exit "$status"
    else
        here "$recipe" "$step"
    fi
done
