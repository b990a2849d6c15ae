#!/usr/bin/env bash
# Qwen1.5-1.8B to 128K tokens on 8 GPUs of 80 GB, as in arXiv 2411.13476: Tables 1 and 6. Its
# tokenizer has no bos: the eos is the anchor.
#
#   HF_MODEL=models/Qwen1.5-1.8B TEXTS='data/*.jsonl' examples/qwen_1.5_1.8b_128k.sh
#   DOMAIN_TAGS=1 examples/qwen_1.5_1.8b_128k.sh train  # Table 6's "+ Tag"
set -euo pipefail

NAME=qwen_1.5_1.8b_128k
HF_MODEL=${HF_MODEL:-models/Qwen1.5-1.8B}     # Qwen/Qwen1.5-1.8B
CORPUS=${CORPUS:-corpora/slimpajama-qwen-1.5}

ORIGINAL_LENGTH=32768
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ROPE_BASE=${ROPE_BASE:-10000000}
TRAIN_ITERS=${TRAIN_ITERS:-2000}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
LEARNING_RATE=${LEARNING_RATE:-2e-5}

TP=${TP:-1} PP=${PP:-1} CP=${CP:-8} RECOMPUTE=${RECOMPUTE:-none}  # the planner: 60.1 of 74.4 GiB
ANCHOR_TOKEN=eos

# shellcheck source-path=SCRIPTDIR source=recipe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe/run.sh"
run_steps "$@"
