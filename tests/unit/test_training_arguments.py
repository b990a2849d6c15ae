"""Flags, defaults and refusals, on the namespace that Megatron's real parser makes."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_anchor.packing.interleave import Interleaving
from megatron_anchor.training.arguments import (
    AnchorArguments,
    add_anchor_arguments,
    anchor_arguments,
    document_alignment,
    interleaving,
    rope_scaling,
)
from megatron_anchor.training.providers import anchor_token_id, document_lists, rotary_settings
from megatron_anchor.training.validation import (
    UNSUPPORTED_FLAGS,
    attention_request,
    refusals,
    require_supported,
)

GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --position-embedding-type rope "
    "--eval-interval 10"
)


@pytest.fixture
def parse(monkeypatch):
    def parse(extra="", base=GOOD):
        from megatron.training.arguments import parse_args

        words = re.findall(r"'[^']*'|\S+", f"{base} {extra}")
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *(w.strip("'") for w in words)])
        return parse_args(add_anchor_arguments)

    return parse


def test_all_our_flags_are_these(parse):
    """Flags are a promise; this list changes only on purpose."""
    assert list(AnchorArguments.__dataclass_fields__) == [
        "attention_pattern",
        "anchor_token",
        "anchor_position",
        "anchor_first_token_loss",
        "packing",
        "document_alignment",
        "document_list",
        "domain_tags",
        "domain_tag_format",
        "interleave_chunks",
        "interleave_max_chunks",
        "interleave_min_chunk_length",
        "interleave_max_chunk_length",
        "balance_attention_work",
        "save_last",
        "save_last_every",
        "attention_precision",
        "anchor_attention_backend",
        "anchor_context_parallel",
        "rope_parameters",
        "rope_angle_dtype",
        "dump_bad_batch",
    ]
    assert anchor_arguments(parse()) == AnchorArguments()


def test_every_flag_has_a_help_text(capsys, parse):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    ours = text[text.index("megatron_anchor:") :]
    for flag in ("--attention-pattern", "--anchor-token", "--packing", "--rope-parameters"):
        assert re.search(rf"{flag} [^\n]+\s+\w+", ours), f"{flag} has no help"


def test_good_arguments_are_not_refused(parse):
    assert refusals(parse()) == []
    require_supported(parse("--tensor-model-parallel-size 2 --context-parallel-size 2"))


def test_context_parallelism_is_ulysses_unless_told_otherwise(parse):
    assert parse().cp_comm_type == ["a2a"]


REFUSED = {
    "--attention-pattern anchr": "unknown attention pattern 'anchr': did you mean 'anchor'",
    "--position-embedding-type learned_absolute": "--position-embedding-type learned_absolute: .*"
    "pass --position-embedding-type rope",
    "--position-embedding-type yarn": r"--rope-parameters '\{\"rope_type\": \"yarn\"",
    "--seq-length 62 --context-parallel-size 2": "--seq-length 62 is not a multiple of 4 "
    r"\(context parallel 2 x 2\); the next lower multiple is 60",
    "--seq-length 66 --tensor-model-parallel-size 4 --sequence-parallel": "--seq-length 66 is not "
    r"a multiple of 4 \(context parallel 1 x tensor parallel 4\)",
    "--hidden-size 60": "--hidden-size 60 is not a multiple of --num-attention-heads 8",
    "--tensor-model-parallel-size 3": "--num-attention-heads 8 cannot be shared by "
    "--tensor-model-parallel-size 3",
    "--group-query-attention --num-query-groups 3": "8 is not a multiple of --num-query-groups 3",
    "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6 "
    "--tensor-model-parallel-size 4": "--num-query-groups 6 and --tensor-model-parallel-size 4",
    "--context-parallel-size 16": "8 query heads per tensor-parallel rank cannot be shared by 16",
    "--context-parallel-size 2 --cp-comm-type p2p": "--cp-comm-type p2p needs Transformer Engine",
    "--context-parallel-size 2 --cp-comm-type all_gather": "--cp-comm-type all_gather needs",
    "--anchor-attention-backend sdap": "unknown --anchor-attention-backend 'sdap'; did you mean",
    "--rope-parameters nonsense": "--rope-parameters is not JSON: 'nonsense'",
    "--rope-parameters 3": "--rope-parameters must be a JSON object",
    "--use-rope-scaling --rotary-seq-len-interpolation-factor 2": "two RoPE scalings",
    "--multi-latent-attention": "--multi-latent-attention: MLA",
    "--mtp-num-layers 1": "--mtp-num-layers: multi-token prediction",
    "--reset-position-ids": "use --attention-pattern intra-document-reset",
    "--mock-data": "--mock-data: packing needs real documents",
    "--softmax-type learnable": "--softmax-type learnable: the kernels have no sink",
    "--document-alignment 3": "--document-alignment 3: --seq-length 64 must be a multiple",
    "--document-alignment 0": "--document-alignment 0",
    "--anchor-token first": "--anchor-token first: expected bos, eos or a token id",
    "--save-last 5": "--save-last 5 needs a folder: give --save",
    "--attention-pattern anchor-masked --document-alignment 4": "which no --document-alignment 4",
    "--anchor-position 2 --attention-pattern full": "--anchor-position 2 has a meaning under",
    "--domain-tag-format {source}": "--domain-tag-format '{source}', expected a text with {domain}",
    "--interleave-chunks --interleave-max-chunks 0": "--interleave-max-chunks 0, expected 1 or",
    "--interleave-chunks --interleave-min-chunk-length 0": "min-chunk-length 0, expected 1",
    "--interleave-chunks --interleave-max-chunk-length 30": "length 30, expected at least 31",
    "--interleave-chunks --attention-pattern intra-document-reset": "--interleave-chunks has no",
    "--anchor-position -3": "--anchor-position -3: expected 0 or more",
    "--interleave-chunks --interleave-max-chunks 0 --domain-tag-format y": "tag-format 'y'",
    "--train-data-path 1 a 0 b": "--train-data-path gives the weight 0: expected above 0",
    "--dataloader-fast-cache-load": "--dataloader-fast-cache-load: it opens the caches",
    "--balance-attention-work --rampup-batch-size 4 4 100": "leave out --rampup-batch-size",
    "--balance-attention-work --dataloader-type cyclic": "needs --dataloader-type single",
    "--full-validation": "--full-validation: Megatron 0.19.2 needs --multiple-validation-sets",
    "--multiple-validation-sets": "--multiple-validation-sets: Megatron 0.19.2 needs --full-val",
    "--full-validation --multiple-validation-sets --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2": "--full-validation: .* interleaved pipelines",
    "--transformer-impl transformer_engine": "Transformer Engine is not installed",
    "--fp8-format hybrid": "--fp8-format hybrid: only --transformer-impl transformer_engine",
    '--rope-parameters \'{"rope_type":"yern"}\'': "unknown rope_type 'yern'",
    '--rope-parameters \'{"rope_type":"linear"}\'': "'linear' needs a parameter",
    "--rotary-percent 0.4": "RoPE rotates pairs",
    "--dump-bad-batch d --fp16": "dynamic loss scale, Inf and NaN are the signals",
    "--dump-bad-batch d --no-check-for-nan-in-loss-and-grad": "looks at no loss",
    "--window-size 128,0": "sliding-window attention is not implemented",
}


@pytest.mark.parametrize("extra", REFUSED)
def test_what_cannot_run_is_refused_with_value_and_remedy(extra, parse):
    with pytest.raises(ValueError, match=REFUSED[extra]):
        require_supported(parse(extra))


def test_missing_shape_arguments_are_named(parse):
    reasons = refusals(parse(base="--position-embedding-type rope"))
    assert [r for r in reasons if "--hidden-size is missing" in r]


def test_all_reasons_are_given_at_once(parse):
    with pytest.raises(ValueError, match=r"(?s)anchr.*--seq-length 63"):
        require_supported(
            parse("--attention-pattern anchr --seq-length 63 --context-parallel-size 2")
        )


def test_every_unsupported_flag_still_exists_in_the_host(parse):
    known = vars(parse())
    known |= dict.fromkeys(("experimental_attention_variant", "window_size", "qk_clip"))
    assert not [name for name in UNSUPPORTED_FLAGS if name not in known]


def test_scalings_take_hugging_face_form(parse):
    assert rope_scaling(parse()) == {}
    assert rope_scaling(parse("--use-rope-scaling"))["rope_type"] == "llama3"
    assert rope_scaling(parse("--use-rope-scaling"))["factor"] == 8.0
    assert rope_scaling(parse("--rotary-seq-len-interpolation-factor 4")) == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = '{"rope_type":"yarn","factor":4.0}'
    assert rope_scaling(parse(f"--rope-parameters '{yarn}'"))["rope_type"] == "yarn"


def test_rotary_settings_follow_the_flags(parse):
    rotary = rotary_settings(parse("--rotary-base 500000 --rotary-percent 0.5 --kv-channels 32"))
    assert (rotary.head_dim, rotary.rotated_dim, rotary.base) == (32, 16, 5e5)


@pytest.mark.parametrize(
    ("flag", "ids", "anchor"),
    [
        (None, {"bos_id": 1, "eos_id": 2}, 1),
        (None, {"bos_id": None, "eos_id": 2}, 2),
        (None, {"bos_id": -1, "eos_id": 2}, 2),
        (None, {"eod": 3}, 3),
        ("bos", {"bos_id": 1, "eos_id": 2}, 1),
        ("eos", {"bos_id": 1, "eos_id": 2}, 2),
        ("5", {"bos_id": 1, "eos_id": 2}, 5),
        ("0", {"bos_id": 1}, 0),
    ],
)
def test_anchor_is_what_the_flag_says_else_bos_else_eos(flag, ids, anchor):
    args = SimpleNamespace(anchor_token=flag, tokenizer_type="X")
    assert anchor_token_id(args, SimpleNamespace(vocab_size=10, **ids)) == anchor


@pytest.mark.parametrize(
    ("flag", "ids", "message"),
    [
        (None, {}, "has no bos and no eos; set --anchor-token"),
        ("bos", {"eos_id": 2}, "has no bos; set --anchor-token to a token id or 'eos'"),
        ("eos", {"bos_id": 2}, "has no eos; set --anchor-token to a token id"),
        ("10", {}, r"anchor token 10 is outside the vocabulary of 10; set --anchor-token"),
        ("eos", {"eos_id": 11}, r"anchor token 11 \(eos of the tokenizer\) is outside"),
    ],
)
def test_no_anchor_or_one_outside_the_vocabulary_is_refused(flag, ids, message):
    args = SimpleNamespace(anchor_token=flag, tokenizer_type="X")
    with pytest.raises(ValueError, match=message):
        anchor_token_id(args, SimpleNamespace(vocab_size=10, **ids))


def test_alignment_follows_the_kind_of_context_parallelism(parse):
    assert document_alignment(parse()) == 1
    assert document_alignment(parse("--context-parallel-size 2")) == 1
    assert document_alignment(parse("--context-parallel-size 2 --cp-comm-type p2p")) == 4
    assert document_alignment(parse("--context-parallel-size 2 --document-alignment 8")) == 8


def test_interleaving_and_first_token_loss_follow_the_flags(parse):
    assert interleaving(parse()) is None
    flags = "--interleave-chunks --interleave-max-chunks 3 --interleave-min-chunk-length 5"
    assert interleaving(parse(flags)) == Interleaving(max_chunks=3, min_chunk_length=5)
    flags += " --interleave-max-chunk-length 9"
    assert interleaving(parse(flags)).max_chunk_length == 9
    assert parse().anchor_first_token_loss
    assert not parse("--no-anchor-first-token-loss").anchor_first_token_loss


def test_float32_attention_asks_for_a_float32_kernel(parse):
    assert attention_request(parse("--bf16")).dtype == torch.bfloat16
    request = attention_request(parse("--bf16 --attention-precision fp32"))
    assert request.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "corpora", "expected"),
    [
        (None, ["a"], None),
        (["l.npy"], ["a"], {"": "l.npy"}),
        (["a=l.npy"], ["a"], {"a": "l.npy"}),
        (["b=l.npy", "a=m.npy"], ["a", "b"], {"b": "l.npy", "a": "m.npy"}),
        (["x=y=l.npy"], ["x=y"], {"x=y": "l.npy"}),
        (["runs/lr=1/l.npy"], ["a"], {"": "runs/lr=1/l.npy"}),
        (["a=b=lr=1.npy", "a=l.npy"], ["a", "a=b"], {"a=b": "lr=1.npy", "a": "l.npy"}),
    ],
)
def test_document_lists_name_their_corpus(given, corpora, expected):
    assert document_lists(given, (corpora, None), None) == expected
    assert document_lists(given, None, [(corpora, None), None, None]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["l.npy"], "there are 2 training corpora; give CORPUS_PREFIX=LIST.npy"),
        (["c=l.npy"], "give CORPUS_PREFIX=LIST.npy with one of a, b"),
        (["a=l.npy", "a=m.npy"], "this corpus has another list already"),
    ],
)
def test_document_lists_without_a_corpus_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        document_lists(given, (["a", "b"], None), None)


def test_anchor_token_id_is_another_name_of_the_flag(parse):
    assert parse("--anchor-token-id 7").anchor_token == "7"
    assert parse("--anchor-token eos").anchor_token == "eos"
