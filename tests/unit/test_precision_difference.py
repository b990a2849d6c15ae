"""D and D_logit against dense float64 mathematics, and the block-wise sums against themselves.

Legend: B shifts, H heads, S tokens, D head dimension, L layers.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_anchor.attention.rope import cos_and_sin
from megatron_anchor.precision import measurement
from megatron_anchor.precision.arms import ARMS, Arm
from megatron_anchor.precision.difference import compare_layer
from megatron_anchor.precision.measurement import measure
from megatron_anchor.precision.models import LayeredModel, open_folder
from tests.tiny_llama import VOCAB, hugging_face_llama

LENGTH, SHIFTS, SHIFT2 = 37, (0, 5, 900), 16


class CoarseAngles(Arm):
    """Float32 throughout but for cos and sin in bfloat16: D is large, and its rounding is not."""

    def rotated(self, x_BHSD, positions_BS, inv_freq_F, *, attention_factor):
        cos, sin = (
            torch.cat((t, t), -1).bfloat16().to(x_BHSD.dtype)[:, None]
            for t in cos_and_sin(positions_BS, inv_freq_F, attention_factor=attention_factor)
        )
        first, second = x_BHSD.chunk(2, -1)
        return x_BHSD * cos + torch.cat((-second, first), -1) * sin


COARSE = CoarseAngles(name="coarse", says="", dtype=torch.float32)


def naive(weights_LHSS, logits_LHSS, others_LHSS, other_logits_LHSS):
    """Equations 4 and 5 as they are written, one term after the other."""
    D = D_logit = 0.0
    pairs = (weights_LHSS.tolist(), others_LHSS.tolist())
    logit_pairs = (logits_LHSS.tolist(), other_logits_LHSS.tolist())
    for layer, other_layer in zip(*pairs, strict=True):
        for head, other in zip(layer, other_layer, strict=True):
            length = len(head)
            for key in range(length):
                column = sum(abs(head[i][key] - other[i][key]) for i in range(key, length))
                D += column / (length - key)
    for layer, other_layer in zip(*logit_pairs, strict=True):
        for head, other in zip(layer, other_layer, strict=True):
            D_logit += sum(abs(a[0] - b[0]) for a, b in zip(head, other, strict=True)) / len(head)
    return D, D_logit


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    hugging_face_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text():
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))


def dense(folder, tokens_S, shift, *, dtype=torch.float64):
    """Weights and scaled logits of every layer, by transformers, but for cos and sin in bf16."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    weights, logits = [], []

    def attention(module, q, k, v, mask, scaling, **_):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        assert q.dtype == dtype
        z = torch.einsum("bhid,bhjd->bhij", q, k) * scaling
        logits.append(z[0])
        visible = torch.ones(z.shape[-2:], dtype=torch.bool).tril()
        weights.append(z.masked_fill(~visible, -torch.inf).softmax(-1)[0])
        return (weights[-1][None] @ v).transpose(1, 2), None

    AttentionInterface.register("dense_oracle", attention)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="dense_oracle"
    )
    rotary = model.model.rotary_emb
    single = rotary.forward
    rotary.forward = lambda x, position_ids: tuple(
        t.bfloat16().to(dtype) for t in single(torch.empty(0), position_ids)
    )
    with torch.no_grad():
        model(tokens_S[None], position_ids=torch.arange(len(tokens_S))[None] + shift)
    return torch.stack(weights), torch.stack(logits)


def test_both_equations_equal_transformers_in_float64_term_by_term(llama, text):
    """To float32 rounding: as near as transformers in float32 comes to itself in float64.

    By the triangle inequality a float32 computation of D is off by no more than the same sum over
    |float32 - float64|, of both shifts.
    """
    drift = measure(
        LayeredModel(open_folder(llama), COARSE, seed=0, device="cpu"),
        COARSE,
        [text],
        shifts=SHIFTS,
        reference_shift=SHIFT2,
        states="end-to-end",
    )
    exact = {shift: dense(llama, text, shift) for shift in (*SHIFTS, SHIFT2)}
    rounding = {
        shift: naive(*exact[shift], *dense(llama, text, shift, dtype=torch.float32))
        for shift in exact
    }
    for number, shift in enumerate(SHIFTS):
        found = drift.totals[number], drift.first_logit_up_to(LENGTH)[number]
        expected = naive(*exact[shift], *exact[SHIFT2])
        for ours, theirs, *floors in zip(
            found, expected, rounding[shift], rounding[SHIFT2], strict=True
        ):
            assert sum(floors) < 1e-3 * theirs  # not a comparison of rounding with rounding
            assert abs(ours - theirs) <= 2 * sum(floors)


def test_every_way_to_look_at_d_adds_up_to_it(llama, text):
    model = LayeredModel(open_folder(llama), ARMS["bf16"], seed=0, device="cpu")
    drift = measure(
        model,
        ARMS["bf16"],
        [text, text.flip(0)],
        shifts=SHIFTS,
        reference_shift=SHIFT2,
        states="shared",
    )
    assert drift.totals.min() > 0
    assert drift.by_head_CLH.sum((1, 2)) == pytest.approx(drift.totals)
    assert drift.by_key_CS.sum(1) == pytest.approx(drift.totals)
    assert drift.first_key_CLH.sum((1, 2)) == pytest.approx(drift.by_key_CS[:, 0])


def test_every_layer_counts_the_rows_of_its_own_window(tmp_path, text):
    """Qwen2 may have windows in its later layers only; D_logit's mean is over the rows that see."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    window, heads = 8, 2
    config = Qwen2Config(
        **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads},
        **{"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1},
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = LayeredModel(open_folder(tmp_path), COARSE, seed=0, device="cpu")
    options = {"shifts": SHIFTS[:1], "reference_shift": SHIFT2, "states": "shared"}
    rows = _rows_of_first_logit(model, text, options)
    drift = measure(model, COARSE, [text], **options)
    for length in (window // 2, window, LENGTH):
        expected = rows[0][:length].sum() / length + rows[1][:length].sum() / min(length, window)
        assert drift.first_logit_up_to(length)[0] == pytest.approx(float(expected))
    assert rows[0][window:].min() > 0 == rows[1][window:].max()


def _rows_of_first_logit(model, text, options):
    """Per layer, the first key's logit differences by row."""
    found = []
    original = measurement.compare_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measurement,
            "compare_layer",
            lambda *args, **named: found.append(original(*args, **named)) or found[-1],
        )
        measure(model, COARSE, [text], **options)
    return [layer.first_logit_CHS.sum(1)[0] for layer in found]


@pytest.mark.parametrize("states", ["end-to-end", "shared"])
def test_a_shift_differs_from_itself_by_nothing(llama, text, states):
    model = LayeredModel(open_folder(llama), ARMS["bf16"], seed=0, device="cpu")
    drift = measure(model, ARMS["bf16"], [text], shifts=(16, 17), reference_shift=16, states=states)
    assert drift.totals[0] == drift.first_logit_CS[0].sum() == 0
    assert drift.totals[1] > 0


def test_the_first_layer_is_the_same_under_both_kinds_of_states(llama, text):
    model = LayeredModel(open_folder(llama), ARMS["bf16"], seed=0, device="cpu")
    own, shared = (
        measure(model, ARMS["bf16"], [text], shifts=SHIFTS, reference_shift=SHIFT2, states=states)
        for states in ("end-to-end", "shared")
    )
    assert own.by_head_CLH[:, 0] == pytest.approx(shared.by_head_CLH[:, 0], rel=1e-6)
    assert own.totals.sum() > shared.totals.sum()


def test_d_logit_of_a_prefix_is_that_of_the_shorter_text(llama, text):
    model = LayeredModel(open_folder(llama), COARSE, seed=0, device="cpu")
    options = {"shifts": SHIFTS, "reference_shift": SHIFT2, "states": "end-to-end"}
    whole = measure(model, COARSE, [text], **options)
    part = measure(model, COARSE, [text[:20]], **options)
    assert whole.first_logit_up_to(20) == pytest.approx(part.first_logit_up_to(20), rel=1e-3)


def random_heads(batch, heads, length, dim, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, dim, generator=generator) for _ in range(3)]


def dense_layer(q_BHSD, k_BHSD, v_BHSD, *, scale, window):
    """compare_layer without blocks, in float64."""
    z = torch.einsum("bhid,bhjd->bhij", q_BHSD.double(), k_BHSD.double()) * scale
    distance = torch.arange(z.shape[-1])[:, None] - torch.arange(z.shape[-1])
    visible = (distance >= 0) & (distance < window)
    weights = z.masked_fill(~visible, -torch.inf).softmax(-1)
    by_key = (weights[1:] - weights[:1]).abs().sum(-2) / visible.sum(0)
    first = (z[1:, :, :, 0] - z[:1, :, :, 0]).abs() * visible[:, 0]
    return by_key, first, (weights @ v_BHSD.double()).transpose(1, 2)


@settings(max_examples=25)
@given(
    length=st.integers(1, 40),
    window=st.integers(1, 50),
    block=st.integers(1, 3000),
    batch=st.integers(2, 3),
)
def test_blocks_and_windows_change_nothing(length, window, block, batch):
    q, k, v = random_heads(batch, 2, length, 4)
    found = compare_layer(q, k, v, arm=COARSE, scale=0.5, window=window, block_logits=block)
    by_key, first, context = dense_layer(q, k, v, scale=0.5, window=window)
    torch.testing.assert_close(found.by_key_CHS, by_key, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.first_logit_CHS, first, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.context_bSHD.double(), context, atol=1e-6, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_does_not_grow_with_the_square_of_the_length():
    q, k, v = random_heads(2, 3, 512, 4)
    with Largest() as largest:
        compare_layer(q, k, v, arm=ARMS["bf16"], scale=0.5, block_logits=1 << 14)
    assert largest.elements <= max(1 << 14, q.numel()) < 512 * 512
