#!/usr/bin/env bash
# A small Llama-shaped model, trained by Megatron's own loop with 4 processes on a CPU.
#
#   PYTHON=.venv/bin/python examples/cpu_demo/train.sh DEMO_FOLDER PATTERN [more Megatron arguments]
#
# On GPUs the same program runs without `megatron_anchor.on_cpu -m` and without the last block.
set -euo pipefail
demo=$1 pattern=$2
shift 2

model=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 352
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 100000
    --seq-length 8192 --max-position-embeddings 8192
)
training=(
    --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --lr 2e-3 --min-lr 2e-4
    --lr-decay-style cosine --lr-warmup-iters 2 --adam-beta2 0.95 --weight-decay 0.1
    --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --seed 1234
    --calculate-per-token-loss --use-distributed-optimizer
)
data=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$demo/tokenizer"
    --data-path 0.5 "$demo/corpus/docstrings_text_document"
    0.2 "$demo/corpus/python-reference_text_document"
    0.3 "$demo/corpus/sources_text_document"
    --data-cache-path "$demo/cache" --split 100,0,0 --num-workers 0
)
output=(
    --log-interval 1 --eval-interval 1000 --eval-iters 0
    --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable
    --tensorboard-dir "$demo/tensorboard/$pattern"
)
cpu=(--transformer-impl local --distributed-backend gloo)
export OMP_NUM_THREADS=1 # as torchrun would set it, without its banner

exec "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node 4 --standalone \
    -m megatron_anchor.on_cpu -m megatron_anchor.pretrain_gpt \
    --attention-pattern "$pattern" \
    "${model[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "${cpu[@]}" "$@"
