#!/bin/bash
# Run a command on a Ray cluster of all nodes of a SLURM job.
#
#   sbatch --nodes=2 deploy/slurm.sh --preset gpt2 --storage-path /storage/runs --data /storage/tokens/openwebtext
#
# Options alone are those of pretrain, on all nodes and GPUs of the job, here gpu:2x8. The options of sbatch replace the
# numbers below, as in sbatch --nodes=4 --gpus-per-node=4 --time=2:00:00. Another command is run as it is:
#
#   sbatch --nodes=2 deploy/slurm.sh pretrain --preset gpt2 --hardware gpu:8x2 --storage-path /storage/runs
#
# Submit it again to continue an unfinished run.
#SBATCH --job-name=pretrain
#SBATCH --ntasks-per-node=1
# All CPUs and all memory of each node.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# 300 s before the end of the time, the command gets SIGTERM. pretrain then saves a checkpoint and stops.
#SBATCH --signal=B:TERM@300
set -euo pipefail

nodes=${SLURM_JOB_NUM_NODES:-1}
if [ $# = 0 ] || [ "${1#-}" != "$1" ]; then
    # Of two --hardware the last one counts. A node may join late.
    gpus=${SLURM_GPUS_ON_NODE:-8}
    set -- pretrain --hardware "gpu:${nodes}x$gpus" --wait-for-resources-s "${NODE_WAIT_S:-300}" "$@"
fi

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${RAY_PORT:-6379}
# Without a token, every user of the machines could run code in this cluster.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN

# `ray start` on the first node, then on the other nodes. A node may join late.
srun --nodes=1 --ntasks=1 --nodelist="$head" --cpu-bind=none ray start --head --port="$port" --block &
first=$!
until ray health-check --address "$head:$port" >/dev/null 2>&1; do
    kill -0 "$first" # ends this script if the first node could not start
    sleep 1
done
others=$((nodes - 1))
if ((others > 0)); then
    srun --nodes=$others --ntasks=$others --exclude="$head" --cpu-bind=none ray start --address="$head:$port" --block &
fi

RAY_ADDRESS="$head:$port" "$@" &
command=$!
stopping=
# The command gets the first SIGTERM, and may take its time to save.
trap 'trap "" TERM; stopping=yes; kill -TERM "$command" 2>/dev/null || true' TERM
code=0
wait "$command" || code=$?
if [ "$stopping" ]; then # SIGTERM ended the first `wait`
    code=0
    wait "$command" || code=$?
fi
trap '' TERM
kill $(jobs -p) || true # the `ray start` of every node
wait
exit "$code"
