"""Flags, defaults and refusals, on the namespace that Megatron's real parser makes."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_anchor import compat
from megatron_anchor.packing.interleave import Interleaving
from megatron_anchor.training import anchor_copies, context_parallel, number_rules
from megatron_anchor.training.arguments import (
    AnchorArguments,
    add_anchor_arguments,
    anchor_arguments,
    document_alignment,
    packing_settings,
    rope_scaling,
)
from megatron_anchor.training.providers import anchor_token_id, document_lists, rotary_settings
from megatron_anchor.training.validation import (
    attention_request,
    refusals,
    require_supported,
)

GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --position-embedding-type rope "
    "--eval-interval 10 --train-iters 4 --lr 1e-3"
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
    assert set(AnchorArguments.__dataclass_fields__) == {
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
        "loss_weighting",
        "effective_context_alpha",
        "effective_context_gamma",
        "effective_context_tail",
        "document_length_schedule",
        "allow_model_change",
        "save_last",
        "save_last_every",
        "anchor_in_window",
        "attention_precision",
        "anchor_attention_backend",
        "anchor_context_parallel",
        "kv_gather_memory_mib",
        "pad_documents_to",
        "rope_parameters",
        "rope_angle_dtype",
        "dump_bad_batch",
    }
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


@pytest.mark.parametrize(
    ("flags", "kind", "sizes"),
    [
        ("", "a2a", None),
        ("--num-query-groups 2", "a2a+gather", [2, 2]),
        ("--num-query-groups 1", "gather", None),
        ("--num-query-groups 2 --cp-comm-type a2a", "a2a", None),
        ("--num-query-groups 8 --cp-comm-type gather", "gather", None),
        ("--num-query-groups 8 --hierarchical-context-parallel-sizes 2 2", "a2a+gather", [2, 2]),
        ("--tensor-model-parallel-size 4", "a2a+gather", [2, 2]),
        ("--anchor-attention-backend te", "a2a", None),
    ],
)
def test_auto_takes_as_many_ranks_for_heads_as_heads_and_node_allow(
    parse, flags, kind, sizes, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    groups = "" if "groups" in flags else "--num-query-groups 8 "
    args = parse(f"--context-parallel-size 4 --group-query-attention {groups}{flags}")
    context_parallel.resolve(args)
    assert args.cp_comm_type == [kind]
    assert args.hierarchical_context_parallel_sizes == sizes


def test_ranks_that_exchange_heads_stay_within_a_node(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = parse("--context-parallel-size 8")
    context_parallel.resolve(args)
    assert args.hierarchical_context_parallel_sizes == [2, 4]


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", number_rules.COUNTS)
def test_counts_below_one_are_refused_before_anything_divides_by_them(parse, name, value):
    args = parse("")
    assert hasattr(args, name)
    setattr(args, name, value)
    context_parallel.resolve(args)
    [reason] = refusals(args)
    assert reason == f"--{name.replace('_', '-')} {value}: expected 1 or more"


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
    "--context-parallel-size 16 --cp-comm-type a2a --seq-length 96": "8 query heads per "
    "tensor-parallel rank cannot be shared by 16",
    "--context-parallel-size 2 --cp-comm-type a2a gather": "gather is for all layers alike",
    "--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 2": "sizes 4 2: expected "
    "two numbers A B with A x B = --context-parallel-size 4",
    "--context-parallel-size 4 --hierarchical-context-parallel-sizes -2 -2": "expected "
    "numbers of 1 or more",
    "--context-parallel-size 4 --hierarchical-context-parallel-sizes 0 4": "sizes 0 4: expected",
    "--hierarchical-context-parallel-sizes 2 2": "there is --context-parallel-size 1",
    "--context-parallel-size 4 --cp-comm-type gather --hierarchical-context-parallel-sizes 2 2": (
        "sizes 2 2 are for --cp-comm-type a2a.gather"
    ),
    "--context-parallel-size 2 --cp-comm-type gather --anchor-context-parallel ulysses": (
        "--cp-comm-type gather and --anchor-context-parallel ulysses ask for two kinds"
    ),
    "--rotary-percent 1.5": "--rotary-percent 1.5: expected at most 1",
    "--rotary-base 0": "--rotary-base 0: expected a number above 0",
    "--lr nan": "--lr nan: expected a number of 0 or more",
    "--context-parallel-size 2 --kv-gather-memory-mib 10": "--kv-gather-memory-mib 10 has no",
    "--context-parallel-size 2 --cp-comm-type gather --kv-gather-memory-mib 1 --seq-length 4096": (
        r"--kv-gather-memory-mib 1: a single key/value head needs \d+ MiB at --seq-length 4096"
    ),
    "--context-parallel-size 2 --cp-comm-type p2p": "--cp-comm-type p2p needs Transformer Engine",
    "--context-parallel-size 2 --cp-comm-type all_gather": "--cp-comm-type all_gather needs",
    "--anchor-attention-backend sdap": "unknown --anchor-attention-backend 'sdap'; did you mean",
    "--rope-parameters nonsense": "--rope-parameters is not JSON: 'nonsense'",
    "--rope-parameters 3": "--rope-parameters must be a JSON object",
    "--use-rope-scaling --rotary-seq-len-interpolation-factor 2": "two RoPE scalings",
    "--reset-position-ids": "use --attention-pattern intra-document-reset",
    "--mock-data": "--mock-data: packing needs real documents",
    "--softmax-type learnable": "--attention-dropout 0.1 with a window or a sink: set it to 0",
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
    "--balance-attention-work --step-batch-size-schedule 0:4": "leave out --step-batch-size-sched",
    "--balance-attention-work --decrease-batch-size-if-needed": "leave out --decrease-batch-size",
    "--balance-attention-work --dataloader-type cyclic": "needs --dataloader-type single",
    "--full-validation": "--full-validation: Megatron 0.19.2 needs --multiple-validation-sets",
    "--multiple-validation-sets": "--multiple-validation-sets: Megatron 0.19.2 needs --full-val",
    "--full-validation --multiple-validation-sets --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2": "--full-validation: .* interleaved pipelines",
    "--transformer-impl transformer_engine": "Transformer Engine is not installed",
    "--fp8-format hybrid": "--fp8-format hybrid: it needs --transformer-impl transformer_engine",
    "--validation-set-names a b": "--validation-set-names a b: Megatron needs --multiple-validat",
    "--apply-layernorm-1p": "--apply-layernorm-1p needs Transformer Engine",
    "--phase-transition-iterations 2": "--phase-transition-iterations 2: .*give --train-samples",
    "--use-megatron-fsdp": "--use-megatron-fsdp: .*pass that",
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --save s": "ranks .* wait for each other",
    "--overlap-moe-expert-parallel-comm --mtp-num-layers 1": "without the tokens of their depths",
    "--save s": "--save s needs --save-interval",
    "--min-lr 1": "--min-lr 1.0 is above --lr 0.001",
    "--lr-warmup-init 1": "--lr-warmup-init 1.0 is above --lr 0.001",
    "--lr-warmup-iters 4": "--lr-warmup-iters 4 leaves nothing of the schedule's 4 iters",
    "--lr-warmup-iters 4 --lr-decay-iters 3": "nothing of the schedule's 3 iters",
    "--no-pad-vocab-size": "--no-pad-vocab-size: Megatron needs --padded-vocab-size",
    "--recompute-granularity selective --recompute-modules mlp layernorm": "modules layernorm: Meg",
    "--lr-decay-style WSD": "--lr-decay-style WSD needs --lr-wsd-decay-iters",
    '--rope-parameters \'{"rope_type":"yern"}\'': "unknown rope_type 'yern'",
    '--rope-parameters \'{"rope_type":"linear"}\'': "'linear' needs a parameter",
    "--rotary-percent 0.4": "RoPE rotates pairs",
    "--dump-bad-batch d --fp16": "dynamic loss scale, Inf and NaN are the signals",
    "--dump-bad-batch d --no-check-for-nan-in-loss-and-grad": "looks at no loss",
    "--num-experts 4 --moe-router-load-balancing-type quantile_balancing": "its quantiles would "
    "count padding and copies",
    "--num-experts 4 --mlp-chunks-for-training 2": "--mlp-chunks-for-training 2: Megatron does not",
    "--window-size 7,0": "--attention-dropout 0.1 with a window or a sink: set it to 0",
    "--window-size 7,7": "--window-size 7,7: expected W-1,0 for a causal window",
    "--window-attn-skip-freq 2": "--window-attn-skip-freq has no effect without --window-size",
    "--anchor-in-window": "--anchor-in-window has no effect without --window-size",
    "--window-size 7,0 --anchor-in-window --attention-pattern full": "is for --attention-pattern "
    "anchor, got full",
    "--window-size 7,0 --window-attn-skip-freq [0,1,1]": "3 entries for --num-layers 2",
}


@pytest.mark.parametrize("extra", REFUSED)
def test_what_cannot_run_is_refused_with_value_and_remedy(extra, parse):
    with pytest.raises(ValueError, match=REFUSED[extra]):
        require_supported(parse(extra))


EXPERTS = "--num-experts 4 --hidden-dropout 0 --attention-dropout 0"
NOT_EXACT = {
    "": ["--hidden-dropout 0.1: it differs", "--attention-dropout 0.1: it differs"],
    "--hidden-dropout 0": ["--attention-dropout 0.1: it differs"],
    "--attention-pattern anchor-masked --attention-dropout 0": ["--hidden-dropout 0.1"],
    "--attention-pattern full": [],
    "--attention-pattern intra-document": [],
    "--hidden-dropout 0 --attention-dropout 0 --moe-expert-capacity-factor 1": [],
    EXPERTS: [],
    f"{EXPERTS} --moe-expert-capacity-factor 1.5": ["--moe-expert-capacity-factor 1.5: padding"],
    f"{EXPERTS} --moe-expert-capacity-factor 1 --attention-pattern full": ["padding and copies"],
    f"{EXPERTS} --moe-input-jitter-eps 0.01": ["--moe-input-jitter-eps 0.01: it differs"],
    f"{EXPERTS} --moe-router-force-load-balancing": ["-load-balancing routes at random"],
    f"{EXPERTS} --moe-router-force-biased 0.5": ["--moe-router-force-biased routes at random"],
}


@pytest.mark.parametrize("extra", NOT_EXACT)
def test_what_makes_copies_of_the_anchor_differ_is_said(extra, parse):
    found = anchor_copies.warnings(parse(extra))
    assert len(found) == len(NOT_EXACT[extra])
    for text, expected in zip(found, NOT_EXACT[extra], strict=True):
        assert expected in text


def test_settings_of_experts_do_not_concern_dense_models(parse):
    assert refusals(parse("--mlp-chunks-for-training 2")) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--optimizer muon", "--optimizer muon: emerging-optimizers is not installed; pip install"),
        ("--async-save --use-persistent-ckpt-worker", "mcore.: nvidia-resiliency-ext is not inst"),
        ("--async-save --use-persistent-ckpt-worker --async-strategy mcore", None),
        ("--async-save", None),  # Megatron saves at once then
        ("--log-straggler", "--log-straggler: nvidia-ml-py is not installed"),
        ("--wandb-project x", "--wandb-project: wandb is not installed"),
    ],
)
def test_packages_that_megatron_imports_late_are_named(flags, reason, parse, monkeypatch):
    monkeypatch.setattr(compat, "is_installed", lambda module: False)
    found = refusals(parse(flags))
    assert len(found) == (reason is not None)
    assert not reason or re.search(reason, found[0])
    monkeypatch.setattr(compat, "is_installed", lambda module: True)
    assert refusals(parse(flags)) == []


def test_missing_arguments_are_named(parse):
    reasons = refusals(parse(base="--position-embedding-type rope"))
    for name in ("--num-layers", "--hidden-size", "--seq-length", "--lr", "--train-iters (or"):
        assert [r for r in reasons if r.startswith(name) and r.endswith(" is missing")], name


def test_what_megatron_knows_by_another_name_is_not_missing(parse):
    base = GOOD.replace("--seq-length", "--encoder-seq-length")
    base = base.replace("--num-layers", "--encoder-num-layers")
    args = parse(base=base)
    assert refusals(args) == []
    require_supported(args)
    assert (args.seq_length, args.encoder_seq_length) == (64, None)
    assert "--seq-length 63" in str(
        refusals(parse("--context-parallel-size 2", base.replace("64", "63")))
    )


def test_the_old_switch_for_rotary_positions_wins(parse):
    base = GOOD.replace("--position-embedding-type rope", "")
    assert "--position-embedding-type learned_absolute" in str(refusals(parse(base=base)))
    assert refusals(parse("--use-rotary-position-embeddings", base)) == []


@pytest.mark.parametrize(
    ("extra", "batches"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", 1),
        ("--num-virtual-stages-per-pipeline-rank 2", 3),
        (
            "--num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            4,
        ),
    ],
)
def test_interleaved_pipelines_need_enough_micro_batches(extra, batches, parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"--num-layers 8 --pipeline-model-parallel-size 2 {extra} --global-batch-size"
    [reason] = refusals(parse(f"{flags} {2 * batches}"))
    assert f"makes {batches} micro-batches for each of 2 data-parallel ranks" in reason
    assert refusals(parse(f"{flags} 12")) == []
    schedule = flags.replace("--global-batch-size", "--step-batch-size-schedule")
    assert refusals(parse(f"{schedule} 0:2")) == [], "batches grow"


def test_pipelines_of_one_chunk_are_not_interleaved(parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    assert refusals(parse(f"{flags} --global-batch-size 1")) == [], "two layers on two ranks"


def test_a_mistyped_flag_ends_with_its_name_and_not_with_all_flags(parse, capsys):
    for words, message in (
        ("--packign concat", "unrecognized arguments: --packign concat"),
        ("--seq-length many", "argument --seq-length: invalid int value: 'many'"),
        ("--packing never", "argument --packing: invalid choice: 'never'"),
        ("--yaml-cfg x.yaml", "argument --yaml-cfg: pass the arguments on the command line"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            parse(words)
        assert str(raised.value).endswith("(--help lists all flags)")
        assert len(str(raised.value).splitlines()) < 4
    assert capsys.readouterr().err == ""


def test_without_a_tokenizer_type_megatrons_own_default_is_taken(parse):
    assert parse().tokenizer_type == "GPT2BPETokenizer"
    assert parse("--tokenizer-type NullTokenizer").tokenizer_type == "NullTokenizer"


def test_all_reasons_are_given_at_once(parse):
    with pytest.raises(ValueError, match=r"(?s)anchr.*--seq-length 63"):
        require_supported(
            parse("--attention-pattern anchr --seq-length 63 --context-parallel-size 2")
        )


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


DEFAULT = '{"rope_type":"default","rope_theta":5000000}'
LINEAR = '{"rope_type":"linear","factor":2.0,"rope_theta":5000000.0,"partial_rotary_factor":0.5}'


@pytest.mark.parametrize("base", ["", "--rotary-base 5000000", "--rotary-base=5000000"])
def test_a_base_inside_rope_parameters_is_the_base(base, parse):
    args = parse(f"--rope-parameters '{DEFAULT}' {base}")
    assert rotary_settings(args).base == 5e6
    require_supported(args)
    assert (args.rotary_base, args.rope_parameters) == (5000000, None), "one place has it"
    assert rotary_settings(args).base == 5e6


def test_the_rest_of_rope_parameters_stays_where_it_was(parse):
    args = parse(f"--rope-parameters '{LINEAR}'")
    require_supported(args)
    assert (args.rotary_base, args.rotary_percent) == (5000000, 0.5)
    assert args.rope_parameters == '{"rope_type": "linear", "factor": 2.0}'
    settings = rotary_settings(args)
    assert dict(settings.scaling) == {"rope_type": "linear", "factor": 2.0}
    assert (settings.base, settings.fraction) == (5e6, 0.5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            f"--rope-parameters '{DEFAULT}' --rotary-base 10000",
            "rope_theta 5e.06, and --rotary-base",
        ),
        (
            f"--rope-parameters '{DEFAULT}' --rotary-base 500000",
            "--rotary-base is 500000; leave one",
        ),
        (
            f"--rope-parameters '{LINEAR}' --rotary-percent 1.0",
            "partial_rotary_factor 0.5, and --rot",
        ),
        ('--rope-parameters \'{"rope_theta":"1e6"}\'', "rope_theta is '1e6', expected a number"),
        (
            "--rope-parameters '{\"rope_theta\":NaN}'",
            "rope_theta is nan, expected a number above 0",
        ),
        ("--rope-parameters '{\"rope_theta\":0}'", "rope_theta is 0, expected a number above 0"),
        ("--rope-parameters '{\"mrope_section\":[8]}'", "nothing reads mrope_section"),
    ],
)
def test_two_bases_and_unreadable_ones_are_refused(extra, message, parse):
    with pytest.raises(ValueError, match=message):
        require_supported(parse(extra))


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
    assert packing_settings(parse()).interleaving() is None
    flags = "--interleave-chunks --interleave-max-chunks 3 --interleave-min-chunk-length 5"
    assert packing_settings(parse(flags)).interleaving() == Interleaving(
        max_chunks=3, min_chunk_length=5
    )
    flags += " --interleave-max-chunk-length 9"
    assert packing_settings(parse(flags)).interleaving().max_chunk_length == 9
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
