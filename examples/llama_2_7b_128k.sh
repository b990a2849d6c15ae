#!/usr/bin/env bash
# Llama-2-7B to 128K tokens on 8 GPUs of 80 GB, as in arXiv 2411.13476: Table 1, and the arms of
# Table 5, UpSampledMix-128K among them.
#
#   HF_MODEL=models/Llama-2-7b-hf TEXTS='data/*.jsonl' examples/llama_2_7b_128k.sh
#   UPSAMPLE=1 examples/llama_2_7b_128k.sh              # long documents more often
set -euo pipefail

NAME=llama_2_7b_128k
HF_MODEL=${HF_MODEL:-models/Llama-2-7b-hf}    # meta-llama/Llama-2-7b-hf
CORPUS=${CORPUS:-corpora/slimpajama-llama-2}  # serves llama_2_7b_64k.sh too: one tokenizer

ORIGINAL_LENGTH=4096
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ROPE_BASE=${ROPE_BASE:-10000000}
TRAIN_ITERS=${TRAIN_ITERS:-2000}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
LEARNING_RATE=${LEARNING_RATE:-2e-5}

# TP2 x CP4 with RECOMPUTE=mlp would be 7 % faster by the planner, but leaves 3 GiB free only.
TP=${TP:-1} PP=${PP:-1} CP=${CP:-8} RECOMPUTE=${RECOMPUTE:-full}  # the planner: 58.2 of 74.4 GiB
ANCHOR_TOKEN=bos
# Without niah_multikey_3 and cwe, which the model cannot do at 4K either (section 4.2).
tasks=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2
tasks+=,niah_multivalue,niah_multiquery,vt,fwe
RULER_TASKS=${RULER_TASKS:-$tasks}

# shellcheck source-path=SCRIPTDIR source=recipe/run.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe/run.sh"
run_steps "$@"
