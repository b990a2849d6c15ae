"""Flags of Megatron that this package serves in its own way, against runs without them."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_anchor.packing.fill_in_the_middle import FillInTheMiddle
from tests.distributed.pretraining import EOD, pretrain, read_scalars, write_corpus
from tests.distributed.ranks import run_ranks
from tests.unit import packing_oracle

LENGTHS = [7, 90, 3, 70, 11, 33, 24, 20] * 4
TOKENS = {"prefix": 120, "suffix": 121, "middle": 122, "end": EOD}
REARRANGED = (
    "--fim-data --fim-rate 0.7 --fim-spm-rate 0.4 --fim-prefix-token 120 --fim-suffix-token 121 "
    f"--fim-middle-token 122 --fim-eod-token {EOD} "
)
BF16 = "--bf16 "
GROUPS = "--group-query-attention --num-query-groups 2 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    write_corpus(folder / "plain", LENGTHS)
    return folder


@pytest.fixture(scope="module")
def train(folder):
    known = {}

    def train(more, ranks=1, corpus="plain", without=""):
        key = (more, ranks, corpus, without)
        if key not in known:
            common = f"--train-iters 4 --data-path {folder}/{corpus} --data-cache-path {folder} "
            scalars = pretrain(
                ranks, common + more, tensorboard=folder / f"run{len(known)}", without=without
            )
            known[key] = {name: np.array([*curve.values()]) for name, curve in scalars.items()}
        return known[key]

    return train


def rearrange(folder):
    """Write what --fim-data makes of the corpus."""
    fill_in = FillInTheMiddle(rate=0.7, suffix_first_rate=0.4, seed=5, **TOKENS)
    corpus = IndexedDataset(f"{folder}/plain")
    texts = [corpus[number] for number in range(len(corpus))]
    chosen = fill_in.is_chosen(np.arange(len(texts)), np.array([len(text) for text in texts]))
    assert 0 < chosen.sum() < len(texts)
    packing_oracle.write_corpus(
        folder / "rearranged",
        [
            [(fill_in.rearranged(number, text) if chosen[number] else text).tolist()]
            for number, text in enumerate(texts)
        ],
    )


def test_fill_in_the_middle_trains_as_on_a_corpus_that_is_rearranged(folder, train):
    rearrange(folder)
    ours, theirs, plain = train(REARRANGED), train("", corpus="rearranged"), train("")
    for scalar in ("lm loss", "grad-norm", "documents per sample"):
        assert ours[scalar].tolist() == theirs[scalar].tolist(), scalar
    assert (np.abs(ours["lm loss"] - plain["lm loss"]) > 1e-4).all()


def test_looking_at_logits_changes_nothing_and_is_the_same_at_every_layout(train):
    plain, watched = train(BF16), train(BF16 + "--log-max-attention-logit ")
    assert watched["lm loss"].tolist() == plain["lm loss"].tolist()
    found = watched["max_attention_logit"]
    assert (found > 0).all()
    assert len(set(found.tolist())) == 4, "of the step, and not of all steps until then"
    split = "--context-parallel-size 2 --cp-comm-type a2a --anchor-context-parallel ulysses "
    for layout in (split, "--recompute-granularity full --recompute-method uniform "):
        ranks = 2 if layout is split else 1
        layout += "--recompute-num-layers 1 " * (ranks == 1)
        other = train(BF16 + "--log-max-attention-logit " + layout, ranks)["max_attention_logit"]
        # Later steps have weights that were trained in bfloat16 with sums in another order.
        assert other[0] == found[0], layout


@pytest.mark.parametrize("latent", [False, True])
def test_clipping_bounds_logits_where_they_exceed_it_and_only_there(train, latent):
    model = BF16 + "--log-max-attention-logit "
    if latent:
        model += (
            "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
            "--qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16 "
        )
    without = GROUPS * latent
    free = train(model, without=without)
    loose = train(model + "--qk-clip --qk-clip-threshold 1000 ", without=without)
    assert loose["lm loss"].tolist() == free["lm loss"].tolist()
    threshold = free["max_attention_logit"][0] / 4
    tight = train(model + f"--qk-clip --qk-clip-threshold {threshold:.6f} ", without=without)
    assert tight["lm loss"][0] == free["lm loss"][0]
    assert tight["max_attention_logit"][0] == free["max_attention_logit"][0]
    assert (tight["max_attention_logit"][1:] < free["max_attention_logit"][1:] / 2).all()


def from_a_store(arguments, store):
    """One rank of a run that reads its corpus from a folder as object store."""
    from megatron_anchor import compat
    from tests.distributed.pretraining import run_program
    from tests.fake_store import Store, installed

    found = compat.is_installed
    compat.is_installed = lambda module: module == "boto3" or found(module)
    with installed(Store(store)):
        run_program(arguments)


def test_a_corpus_in_an_object_store_trains_as_its_files_do(folder, train):
    scalars = folder / "stored"
    arguments = (
        f"--train-iters 4 --data-path s3://bucket/plain --object-storage-cache-path {folder}/idx "
        f"--data-cache-path {folder}/samples --tensorboard-dir {scalars} "
        "--context-parallel-size 2 --cp-comm-type a2a"
    )
    run_ranks(from_a_store, 2, arguments, folder)
    found, plain = read_scalars(scalars)["lm loss"], train("")["lm loss"]
    np.testing.assert_allclose([*found.values()], plain, rtol=1e-6)
