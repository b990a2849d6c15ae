"""The border to Megatron's flags in its real program: what is refused, said, and carried."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace

import pytest

from megatron_anchor.checkpoint.hugging_face_config import config_for
from megatron_anchor.checkpoint.megatron_args import model_from_args
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from tests.distributed.pretraining import MODEL, TRAINING, ending, pretrain, write_corpus
from tests.distributed.ranks import run_ranks

ROPE = "--position-embedding-type rope"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "few", [30, 5, 90, 1] * 40)


@pytest.fixture(scope="module")
def data(corpus):
    return f"--data-path {corpus} --data-cache-path {corpus.parent / 'cache'} --train-iters 3 "


REFUSED = {
    "--logits-load-dir x": "--logits-load-dir x: distillation from cached logits is not implemen",
    "--inprocess-restart": "--inprocess-restart: restarts inside the process are not wired",
    "--freeze-all-layers": "--freeze-all-layers: Megatron 0.19.2 freezes nothing",
    "--decoder-seq-length 128": "--decoder-seq-length 128: it is for encoder-decoder models",
    "--eval-iters 1": "--eval-iters 1 evaluates on the validation split, .* --split 100,0,0 leaves",
    "--apply-layernorm-1p": "--apply-layernorm-1p needs Transformer Engine",
    "--lr-warmup-iters 5": "--lr-warmup-iters 5 leaves nothing of the schedule's 3 iters",
    "--save-interval 0 --save x": "--save-interval 0: expected 1 or more",
    # Megatron's own, which were tracebacks.
    "--max-position-embeddings 32": "Megatron refuses these arguments: max_position_embeddings",
    "--use-precision-aware-optimizer": "--use-precision-aware-optimizer: Transformer Engine is no",
    "--num-experts 4 --moe-router-topk 1": "Megatron refuses these arguments: Please use --moe-ro",
    "--moe-ffn-hidden-size 8": "Megatron refuses these arguments: moe_ffn_hidden_size is set but",
    "--squared-relu": "Megatron refuses these arguments: assert not args.swiglu .*megatron",
    "--seq-length many": "argument --seq-length: invalid int value: 'many'",
    "--packign concat": "unrecognized arguments: --packign concat",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_run_ends_at_start_with_status_2_and_few_words(flags, data):
    end = ending(data + flags)
    assert end.status == 2, end
    said = end.said[end.said.index("error:") :]
    assert re.search(REFUSED[flags], said), said
    assert len(said.splitlines()) < 8, said
    assert "Traceback" not in end.said
    assert "building GPT model" not in end.told
    assert " > number of parameters" not in end.told, "found before the model was built"


def test_corpora_that_are_missing_are_said_before_the_model_is_built(tmp_path):
    end = ending(f"--data-path 1 {tmp_path}/a 2 {tmp_path}/b --train-iters 2")
    assert end.status == 2
    assert [line for line in end.said.splitlines() if line.startswith("  - ")] == [
        f"  - {tmp_path}/{name}" for name in ("a.bin", "a.idx", "b.bin", "b.idx")
    ]
    assert " > number of parameters" not in end.told


def test_a_training_corpus_alone_needs_no_evaluation(corpus, tmp_path):
    alone = f"--train-data-path {corpus} --data-cache-path {tmp_path} --train-iters 2 "
    end = ending(alone + "--eval-iters 2", without="--split 100,0,0")
    assert end.status == 2
    assert "--train-data-path names none; pass --eval-iters 0" in end.said
    assert ending(alone, without="--split 100,0,0").status == 0


def test_a_script_without_a_tokenizer_type_gets_megatrons_default(data):
    """Megatron's own tokenizer needs its files, or the network."""
    kind = "--tokenizer-type NullTokenizer"
    end = ending(data + "--vocab-file /nowhere/v --merge-file /nowhere/m", without=kind)
    assert end.status == 2
    assert "tokenizer_type None" not in end.said
    assert "Megatron refuses these arguments" in end.said
    assert "gpt2" in end.said


def test_the_old_switch_for_rotary_positions_trains(data):
    end = ending(data + "--use-rotary-position-embeddings --no-position-embedding", without=ROPE)
    assert end.status == 0, end.said
    assert "--no-position-embedding: rotary positions stay" in end.told


def test_what_has_no_effect_is_said_once(data):
    end = ending(data + "--eod-mask-loss --num-classes 3 --fim-rate 0.1")
    assert end.status == 0, end.said
    assert end.told.count("> these arguments have no effect here:") == 1
    for flag in (
        "--eod-mask-loss: the slot",
        "--num-classes 3: read for",
        "--fim-rate 0.1: read wi",
    ):
        assert end.told.count(flag) == 1


def test_a_base_inside_rope_parameters_trains_like_the_flag(data, tmp_path):
    inside = '--rope-parameters {"rope_type":"default","rope_theta":5000000}'
    curves = [
        pretrain(1, f"{data} {flags}", tensorboard=tmp_path / str(number))["lm loss"]
        for number, flags in enumerate(("", "--rotary-base 5000000", inside))
    ]
    assert curves[1] == curves[2]
    assert curves[0] != curves[2]


def test_a_checkpoint_and_its_export_hold_one_base(data, tmp_path):
    given = '{"rope_type":"linear","factor":2.0,"rope_theta":5000000}'
    flags = f"--rope-parameters '{given}' --save {tmp_path} --save-interval 3 --no-save-optim"
    assert ending(data + flags).status == 0
    with Files() as files:
        saved = TorchDistCheckpoint(tmp_path / "iter_0000003", files).common_state()["args"]
    assert saved.rotary_base == 5000000
    assert json.loads(saved.rope_parameters) == {"rope_type": "linear", "factor": 2.0}
    for args, base in ((saved, 5e6), (Namespace(**vars(saved) | OLD), 1e4)):
        model = model_from_args(args, family=None, padded_vocabulary=128)
        config = config_for(model, dtype="float32")
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == base
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


OLD = {
    "rotary_base": 10000,
    "rope_parameters": '{"rope_type":"linear","factor":2.0,"rope_theta":3}',
}
"""What runs recorded that read the base from its flag alone."""


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (2, "--context-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    ],
)
def test_iterations_are_skipped_at_every_layout(ranks, layout, data, tmp_path):
    """Skipping reads the batches and trains on none: the next one is the one without it."""
    skip = f"{data} {layout} --iterations-to-skip 2 --lr-decay-iters 100"
    skipped = pretrain(ranks, skip, tensorboard=tmp_path / "skip")["lm loss"]
    whole = pretrain(
        ranks, skip.replace("2 --lr-decay", "9 --lr-decay"), tensorboard=tmp_path / "b"
    )
    assert skipped[1] == whole["lm loss"][1]
    assert set(skipped) == {1, 3}
    # Of other data than the second batch: one step less, but the third batch.
    assert skipped[3] != pytest.approx(whole["lm loss"][2], rel=1e-6)
    assert skipped[3] != pytest.approx(whole["lm loss"][3], rel=1e-6)


def counted_tokens(arguments):
    """What Megatron's TFLOP/s figure comes from, for each iteration: tokens, squared lengths."""
    from megatron.training import training

    from megatron_anchor import pretrain_gpt

    counts, consume = [], training.consume_seqlen_stats_in_iteration

    def record():
        counts.append(consume())
        return counts[-1]

    training.consume_seqlen_stats_in_iteration = record
    sys.argv = ["pretrain_gpt", *(MODEL + TRAINING + arguments).split()]
    pretrain_gpt.main()
    return counts


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--context-parallel-size 2"),
    ],
)
def test_the_throughput_counts_every_token_once(ranks, layout, data):
    [alone] = run_ranks(counted_tokens, 1, data)
    assert [tokens for tokens, _ in alone] == [256.0] * 3, "4 samples of 64 slots"
    assert min(squares for _, squares in alone) < 0.6 * 4 * 64**2, "the masked work"
    for counts in run_ranks(counted_tokens, ranks, data + layout):
        assert counts == alone
