"""What we hand to Transformer Engine, seen by its real Python code; a snapshot, checked always."""

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_anchor.attention.backends import te, te_rules
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.context_parallel.split import slots_in_zigzag
from tests import te_signatures, te_stand_in
from tests.distributed.ranks import run_ranks
from tests.unit.test_backend_refusals import FA2, FA3, FA4, TE, request, te_cp

needs_te = pytest.mark.skipif(not te_stand_in.is_usable(), reason=te_stand_in.MISSING)

LENGTHS = [37, 5, 90, 1, 123]


def packed_documents():
    cu_seqlens = torch.tensor([[0, *LENGTHS]]).cumsum(1).to(torch.int32)
    T = sum(LENGTHS)
    return pack_micro_batch(torch.arange(T)[None], cu_seqlens, seq_length=T)


# Checked always: the snapshot of Transformer Engine against Megatron's wrapper and our call.


def host_wrapper():
    """Megatron's TEDotProductAttention, parsed and not imported."""
    spec = importlib.util.find_spec("megatron.core.extensions")
    path = Path(spec.submodule_search_locations[0]) / "transformer_engine.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.ClassDef) and inner.name == "TEDotProductAttention":
                return inner
    raise AssertionError("Megatron has no TEDotProductAttention")


def parameters_of(method):
    node = next(
        n for n in host_wrapper().body if isinstance(n, ast.FunctionDef) and n.name == method
    )
    return [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]


def keywords_of_our_calls():
    """Names in the calls of backends/te.py: those that build the module and those that run it."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(te))) if isinstance(n, ast.Call)]
    return {
        ast.unparse(call.func): {k.arg for k in call.keywords if k.arg is not None}
        for call in calls
    }


def test_our_calls_use_parameters_that_megatrons_wrapper_has():
    ours = keywords_of_our_calls()
    assert ours["TEDotProductAttention"] <= set(parameters_of("__init__"))
    assert {"cp_comm_type", "pg_collection", "softmax_scale"} <= ours["TEDotProductAttention"]
    assert ours["module"] <= set(parameters_of("forward"))
    assert ours["module"] == {"attn_mask_type", "packed_seq_params"}


def test_every_field_that_megatron_passes_on_is_known_to_transformer_engine():
    held_back = {"local_cp_size", "cp_group", "total_tokens", "seq_idx", "tokens_per_sample"}
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    assert held_back <= fields
    assert fields - held_back <= set(te_signatures.snapshot()["DotProductAttention.forward"])


def test_documents_go_to_transformer_engine_as_plain_thd_without_padded_tensors():
    params = te.thd_params(packed_documents().runs())
    assert type(params) is PackedSeqParams, "fields of a subclass are not sent"
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 37, 42, 132, 133, 256]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.max_seqlen_q == params.max_seqlen_kv == 123
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    assert params.pad_between_seqs is False, "None would be guessed by object identity"


# The partition.

whole_documents = st.lists(st.integers(1, 6), min_size=1, max_size=7)


@given(chunks=whole_documents, ranks=st.sampled_from([2, 3, 4, 8]))
def test_ranks_hold_every_slot_once_and_the_same_share_of_every_document(chunks, ranks):
    lengths = [2 * ranks * n for n in chunks]
    cu_seqlens = torch.tensor([[0, *lengths, 0]]).cumsum(1)
    held = list(torch.from_numpy(slots_in_zigzag(cu_seqlens[0].numpy(), cp_size=ranks)))
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
    for a, b in zip(cu_seqlens[0], cu_seqlens[0, 1:], strict=False):
        work = {int((s[(s >= a) & (s < b)] - a + 1).sum()) for s in held}
        assert len(work) == 1, "causal work is the same on every rank"


@pytest.mark.parametrize("ragged", [[4, 6, 2], [1], [8, 3, 1]])
def test_documents_that_cannot_be_cut_evenly_are_refused(ragged):
    number, length = next((i, n) for i, n in enumerate(ragged) if n % 4)
    with pytest.raises(
        ValueError, match=rf"document {number} .* has {length} slots.*--document-alignment 4"
    ):
        slots_in_zigzag(np.cumsum([0, *ragged]), cp_size=2)


@needs_te
@settings(max_examples=20)
@given(chunks=whole_documents, ranks=st.sampled_from([2, 4]))
def test_our_partition_is_transformer_engines(chunks, ranks):
    import torch.distributed as dist
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    cu_seqlens = torch.tensor([0, *(2 * ranks * n for n in chunks)]).cumsum(0)
    tokens = torch.arange(int(cu_seqlens[-1]))[None]
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda group=None: ranks)
            patch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
            theirs, _, _ = context_parallel.get_batch_on_this_cp_rank(
                cu_seqlens, tokens, None, None
            )
        ours = slots_in_zigzag(cu_seqlens.numpy(), cp_size=ranks)[rank]
        assert np.array_equal(ours, theirs[0].numpy())


@needs_te
def test_our_partition_is_the_example_in_transformer_engines_documentation():
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    text = context_parallel.thd_sequence_order_to_cp_rank_order.__doc__
    lists = [
        [float(x) for x in re.findall(r"\d+", found)] for found in re.findall(r"\[([^]]*)\]", text)
    ]
    x, cu_seqlens, expected = lists[:3]
    assert cu_seqlens == [0, 8, 16, 24, 40]
    held = slots_in_zigzag(np.array(cu_seqlens), cp_size=4)
    assert np.array(x)[held.ravel()].tolist() == expected


# Transformer Engine's real argument checks and choice of kernel.


@needs_te
def test_the_snapshot_is_what_is_installed():
    assert te_signatures.read() == te_signatures.snapshot()


def call_on_one_rank():
    """Call our kernel; give what DotProductAttention received, and its error for wrong calls."""
    from types import SimpleNamespace

    import torch.distributed as dist
    import transformer_engine.pytorch as te_pytorch
    from megatron.core import mpu
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.backends import Layer, bind_backend, sdpa

    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    groups = SimpleNamespace(
        tp=mpu.get_tensor_model_parallel_group(), cp=mpu.get_context_parallel_group()
    )
    kernel = bind_backend(
        "te", Layer(config=config, layer_number=1, scale=0.3, pg_collection=groups)
    )
    packed = packed_documents()
    torch.manual_seed(0)
    q, k, v = (torch.randn(256, heads, 16).bfloat16() for heads in (4, 2, 2))
    received = {}
    forward = te_pytorch.DotProductAttention.forward

    def spy(self, *args, **kwargs):
        received.update(kwargs, training=self.training, kinds=[type(x).__name__ for x in args])
        return forward(self, *args, **kwargs)

    te_pytorch.DotProductAttention.forward = spy
    out = kernel(q, k, v, runs=packed.runs(), scale=0.3, dropout=0.0)
    te_pytorch.DotProductAttention.forward = forward
    expected = sdpa.attend(q, k, v, runs=packed.runs(), scale=0.3, dropout=0.0)
    module = kernel._module(4, 2)
    heads_are_original = (config.num_attention_heads, config.sequence_parallel) == (4, False)

    def error_of(wrong):
        try:
            module(
                q,
                k,
                v,
                None,
                attn_mask_type=wrong.pop("mask", "padding_causal"),
                packed_seq_params=PackedSeqParams(**wrong),
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    from megatron.core.transformer.enums import AttnMaskType

    good = vars(te.thd_params(packed.runs()))
    errors = [
        error_of({**good, "mask": AttnMaskType.padding_causal, "cu_seqlens_q": long(good)}),
        error_of({**good, "mask": AttnMaskType.padding_causal, "qkv_format": "sbhd"}),
        error_of({**good, "mask": AttnMaskType.padding_causal, "cu_seqlens_kv": None}),
    ]
    dist.destroy_process_group()
    tensors = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in received.items()}
    return tensors, float((out - expected).abs().max()), errors, heads_are_original


def long(good):
    return good["cu_seqlens_q"].long()


@needs_te
def test_transformer_engine_receives_what_we_mean_and_would_notice_what_is_wrong():
    ((received, difference, errors, heads_are_original),) = run_ranks(call_on_one_rank, 1)
    assert received["qkv_format"] == "thd"
    assert received["attn_mask_type"] == "padding_causal"
    assert received["cu_seqlens_q"] == received["cu_seqlens_kv"] == [0, 37, 42, 132, 133, 256]
    assert received["max_seqlen_q"] == received["max_seqlen_kv"] == 123
    assert received["cu_seqlens_q_padded"] is received["cu_seqlens_kv_padded"] is None
    assert received["pad_between_seqs"] is False
    assert received["training"]
    assert set(received) <= {
        *te_signatures.snapshot()["DotProductAttention.forward"],
        "training",
        "kinds",
    }
    assert difference < 0.02, "bfloat16 against sdpa"
    assert "int32" in errors[0]
    assert "4D tensors" in errors[1]
    assert "can not be None" in errors[2]
    assert heads_are_original, "the layer's config is not changed"


SM = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3)]
FLASH = [
    {},
    *({"flash-attn": found} for found in ("2.0.9", "2.1.1", "2.4.0", "2.7.2", "2.8.3", "2.8.4")),
    FA3,
    FA4,
    FA2 | FA4,
    FA3 | FA4,
]
HOW = [
    *({"kind": kind} for kind in (None, "p2p", "all_gather", "a2a", "a2a+p2p")),
    *({"kind": kind, "preferred": "flash"} for kind in (None, "all_gather", "a2a+p2p")),
    {"kind": None, "preferred": "fused"},
    *({"kind": kind, "deterministic": True} for kind in (None, "p2p", "all_gather")),
    *({"kind": None, "dropout": 0.1, **more} for more in ({}, {"preferred": "flash"})),
    *({"kind": kind, "odd": True} for kind in ("p2p", "a2a", "a2a+p2p")),
]
CASES = [
    dict(capability=sm, packages=packages, head_dim=head_dim, **how)
    for sm in SM
    for packages in FLASH
    for head_dim in (64, 128, 192, 256)
    for how in HOW
]


def choices_on_invented_devices(cases):
    """Ask Transformer Engine's real selector; what it asks of other libraries is stated here."""
    import os

    from packaging.version import Version
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    flash = utils.FlashAttentionUtils
    first_versions = flash.version_required, flash.version_required_blackwell

    def install(capability, packages):
        """What its backends.py does at import."""
        flash.version = Version(packages.get("flash-attn", "0"))
        first = first_versions[capability >= (10, 0)]
        flash.is_installed = flash.is_version_supported(flash.version, first)
        if flash.is_installed:
            flash.set_flash_attention_version()
        flash.v3_is_installed = "flash-attn-3" in packages
        flash.v4_is_installed = "flash-attn-4" in packages

    def validate_in_flash_4(head_dim, head_dim_v, major, alignment):
        largest = 256 if major == 9 else 128
        assert head_dim <= largest or (head_dim == 256 and major in (10, 11))

    def cudnn(capability):
        """Packed documents in training: from sm90 on, heads of 128, on sm90 256."""

        def answer(head_dim_qk, **_):
            largest = {(9, 0): 256}.get(capability, 128) if capability >= (9, 0) else 0
            return int(head_dim_qk <= largest), ""

        return answer

    flash.v4_validate_head_dims = staticmethod(validate_in_flash_4)
    chosen = []
    for case in cases:
        capability, kind = case["capability"], case["kind"]
        install(capability, case["packages"])
        utils.get_device_compute_capability = lambda capability=capability: capability
        utils._get_fused_attn_backend = cudnn(capability)
        preferred = case.get("preferred", "auto")
        for name in ("flash", "fused", "unfused"):  # as Megatron's --attention-backend does
            os.environ[f"NVTE_{name.upper()}_ATTN"] = str(int(preferred in ("auto", name)))
        cp = {"context_parallel": True, "cp_comm_type": kind, "cp_size": 6, "cp_size_a2a": 3}
        answer = utils.get_attention_backend(
            utils.AttentionParams(
                qkv_layout="thd_thd_thd",
                batch_size=4,
                num_heads=9 if case.get("odd") else 36,
                num_gqa_groups=3 if case.get("odd") else 12,
                max_seqlen_q=65536,
                max_seqlen_kv=65536,
                num_tokens_q=131072,
                num_tokens_kv=131072,
                head_dim_qk=case["head_dim"],
                head_dim_v=case["head_dim"],
                attn_mask_type="padding_causal",
                window_size=(-1, 0),
                bottom_right_diagonal=False,
                core_attention_bias_requires_grad=False,
                attention_dropout=case.get("dropout", 0.0),
                deterministic=case.get("deterministic", False),
                **({} if kind is None else cp if kind != "a2a" else cp | {"cp_size": 3}),
            )
        )
        selected = dict(flash=answer[0], fused=answer[2], unfused=answer[4])
        chosen.append(next((name for name, on in selected.items() if on), None))
    return chosen


def our_reason(case):
    kind = case["kind"]
    cp = te_cp(kind, size=3 if kind == "a2a" else 6, a2a_size=3) if kind else {}
    shared = ("packages", "head_dim", "preferred", "dropout", "deterministic")
    heads = (9, 3) if case.get("odd") else (36, 12)
    return te_rules.unsupported_reason(
        request(
            case["capability"],
            query_heads=heads[0],
            kv_heads=heads[1],
            **{name: case[name] for name in shared if name in case} | cp,
        ),
    )


def is_right(case, kernel):
    return kernel == "fused" or (kernel == "flash" and case["kind"] != "all_gather")


def we_take_less(case):
    """FlashAttention 4 with wide heads, which was not tried."""
    return "flash-attn-4" in case["packages"] and case["head_dim"] > 128


@needs_te
def test_our_rules_foresee_transformer_engines_choice():
    """On each device, with each flash-attn, kind and head: served is what it does right."""
    cases = [case | {"packages": TE | case["packages"]} for case in CASES]
    (chosen,) = run_ranks(choices_on_invented_devices, 1, cases)
    assert {*chosen} == {"flash", "fused", "unfused", None}
    wrong = [
        (case, kernel, reason)
        for case, kernel in zip(cases, chosen, strict=True)
        if ((reason := our_reason(case)) is None) != is_right(case, kernel)
        and (reason is None or not we_take_less(case))
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[:3]}"


# The layer spec.


def layers_on_one_rank():
    """Build a model of stock Transformer Engine layers around our attention."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        qk_layernorm=True,
        transformer_impl="transformer_engine",
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config,
        anchor_block_spec(config, rotary=RotarySettings(head_dim=16), backend="te"),
        vocab_size=128,
        max_sequence_length=1,
        position_embedding_type="none",
    )
    dist.destroy_process_group()
    kinds = {name: type(module).__name__ for name, module in model.decoder.named_modules()}
    return kinds, [key for key in model.state_dict() if "core_attention" in key]


@needs_te
def test_stock_transformer_engine_layers_hold_our_attention():
    ((kinds, keys),) = run_ranks(layers_on_one_rank, 1)
    attention = "layers.0.self_attention"
    assert kinds[f"{attention}.core_attention"] == "AnchorCoreAttention"
    assert kinds[f"{attention}.linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert kinds[f"{attention}.linear_proj"] == "TERowParallelLinear"
    assert kinds["layers.0.mlp.linear_fc1"] == "TELayerNormColumnParallelLinear"
    assert kinds["layers.0.mlp.linear_fc2"] == "TERowParallelLinear"
    assert kinds[f"{attention}.q_layernorm"] == kinds["final_layernorm"] == "RMSNorm"
    assert "TorchNorm" not in kinds.values()
    assert keys == [], "the kernel leaves nothing in checkpoints"


def latent_layers_on_one_rank(q_lora_rank, fused):
    """The same with multi-latent attention and multi-token prediction."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=24,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        qk_layernorm=True,
        mla_down_proj_fusion=fused,
        mtp_num_layers=1,
        add_bias_linear=False,
        attention_dropout=0.0,
        apply_rope_fusion=False,
        transformer_impl="transformer_engine",
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec = anchor_block_spec(
        config, rotary=RotarySettings(head_dim=8, interleaved=True), backend="sdpa"
    )
    model = GPTModel(
        config,
        spec,
        mtp_block_spec=spec.mtp,
        vocab_size=128,
        max_sequence_length=1,
        position_embedding_type="none",
    )
    dist.destroy_process_group()
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return kinds, [key for key in model.state_dict() if "core_attention" in key]


@needs_te
@pytest.mark.parametrize(("q_lora_rank", "fused"), [(None, False), (32, False), (32, True)])
def test_latent_and_further_layers_of_transformer_engine_hold_our_attention(q_lora_rank, fused):
    ((kinds, keys),) = run_ranks(latent_layers_on_one_rank, 1, q_lora_rank, fused)
    layer = "AnchorFusedLatentAttention" if fused else "AnchorLatentAttention"
    for prefix in ("decoder.layers.0", "mtp.layers.0.mtp_model_layer"):
        attention = f"{prefix}.self_attention"
        assert kinds[prefix] == "AnchorTransformerLayer"
        assert kinds[attention] == layer
        assert kinds[f"{attention}.core_attention"] == "AnchorCoreAttention"
        assert kinds[f"{attention}.linear_kv_up_proj"] == "TELayerNormColumnParallelLinear"
        if q_lora_rank is None:  # as in DeepSeek-V2-Lite: no norm but that of the layer
            assert kinds[f"{attention}.linear_q_proj"] == "TEColumnParallelLinear"
        else:
            assert kinds[f"{attention}.linear_q_up_proj"] == "TELayerNormColumnParallelLinear"
        down = "linear_qkv_down_proj" if fused else "linear_kv_down_proj"
        expected = "TELayerNormColumnParallelLinear" if fused else "TELinear"
        assert kinds[f"{attention}.{down}"] == expected
    assert kinds["mtp.layers.0"] == "AnchorMultiTokenLayer"
    assert "TorchNorm" not in kinds.values()
    assert keys == []
