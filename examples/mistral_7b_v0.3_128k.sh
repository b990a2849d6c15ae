#!/usr/bin/env bash
# Mistral-7B-v0.3 to 128K tokens on 8 GPUs of 80 GB, as in arXiv 2411.13476: Tables 1 and 6.
#
#   HF_MODEL=models/Mistral-7B-v0.3 TEXTS='data/*.jsonl' examples/mistral_7b_v0.3_128k.sh
#   DOMAIN_TAGS=1 examples/mistral_7b_v0.3_128k.sh train     # Table 6's "+ Tag"
set -euo pipefail

NAME=mistral_7b_v0.3_128k
HF_MODEL=${HF_MODEL:-models/Mistral-7B-v0.3}  # mistralai/Mistral-7B-v0.3
CORPUS=${CORPUS:-corpora/slimpajama-mistral-v0.3}

ORIGINAL_LENGTH=32768
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ROPE_BASE=${ROPE_BASE:-10000000}
TRAIN_ITERS=${TRAIN_ITERS:-2000}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
LEARNING_RATE=${LEARNING_RATE:-2e-5}

TP=${TP:-2} PP=${PP:-1} CP=${CP:-4} RECOMPUTE=${RECOMPUTE:-mlp}  # the planner: 67.7 of 74.4 GiB
ANCHOR_TOKEN=bos

# shellcheck source-path=SCRIPTDIR source=recipe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe/run.sh"
run_steps "$@"
