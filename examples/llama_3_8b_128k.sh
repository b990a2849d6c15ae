#!/usr/bin/env bash
# Llama-3-8B to 128K tokens on 8 GPUs of 80 GB, as in arXiv 2411.13476: Tables 1 and 6.
#
#   HF_MODEL=models/Meta-Llama-3-8B TEXTS='data/*.jsonl' examples/llama_3_8b_128k.sh
#   DOMAIN_TAGS=1 examples/llama_3_8b_128k.sh train     # Table 6's "+ Tag"
set -euo pipefail

NAME=llama_3_8b_128k
HF_MODEL=${HF_MODEL:-models/Meta-Llama-3-8B}  # meta-llama/Meta-Llama-3-8B
CORPUS=${CORPUS:-corpora/slimpajama-llama-3}

ORIGINAL_LENGTH=8192
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ROPE_BASE=${ROPE_BASE:-10000000}
TRAIN_ITERS=${TRAIN_ITERS:-2000}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
LEARNING_RATE=${LEARNING_RATE:-2e-5}

TP=${TP:-2} PP=${PP:-1} CP=${CP:-4} RECOMPUTE=${RECOMPUTE:-full}  # the planner: 56.6 of 74.4 GiB
ANCHOR_TOKEN=bos

# shellcheck source-path=SCRIPTDIR source=recipe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe/run.sh"
run_steps "$@"
