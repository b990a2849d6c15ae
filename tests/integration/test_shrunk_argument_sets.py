"""Argument sets made small keep what they combine, and train."""

from __future__ import annotations

from tests.host_argument_sets import ArgumentSet
from tests.shrunk_argument_sets import STEPS, corpus_for_all, fingerprint, shrink, train

LARGE = (
    "--num-layers 64 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 512 --lr 1e-4 "
    "--min-lr 1e-5 --train-iters 1000 --lr-decay-iters 900 --bf16 --eval-interval 100 "
    "--eval-iters 10 --use-distributed-optimizer --data-path ${DATA} --vocab-file ${VOCAB} "
    "--attention-backend flash --transformer-impl transformer_engine --split 99,1,0 "
)
PARALLEL = (
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 2 --num-experts 64 --moe-layer-freq ([0]*3+[1]*61) "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --moe-ffn-hidden-size 2048 "
)


def small(text):
    return shrink(ArgumentSet("x", text.split()))


def value(shrunk, flag):
    return shrunk.words[shrunk.words.index(flag) + 1]


def test_layouts_keep_their_kinds_and_get_as_many_ranks_as_they_need():
    found = small(LARGE + PARALLEL)
    assert found.ranks == 4  # TP2 PP2 for attention, EP2 PP2 for experts
    assert "--sequence-parallel" in found.words
    assert value(found, "--num-layers") == "4"  # two stages of two chunks
    assert value(found, "--num-layers-per-virtual-pipeline-stage") == "1"
    assert value(found, "--moe-layer-freq") == "([0]*1+[1]*3)"
    assert value(found, "--global-batch-size") == "8"  # four micro-batches of two
    assert found.left_out == ["--attention-backend"]
    assert not {"--vocab-file", "--attention-backend"} & set(found.words)


def test_sets_that_differ_in_what_is_left_out_alone_are_one():
    one = fingerprint(small(LARGE))
    assert fingerprint(small("--save x --wandb-project y " + LARGE)) == one
    assert fingerprint(small(LARGE + "--swiglu")) != one


def test_a_small_set_trains_and_a_refusal_is_told(tmp_path):
    corpus = corpus_for_all(tmp_path)
    found = train(small(LARGE), corpus)
    assert found.why_not == ""
    assert len(found.losses) == STEPS
    refused = train(small(LARGE + "--sft"), corpus)
    assert refused.losses == []
    assert "--sft: its dataset packs by itself" in refused.why_not
