"""Every arm rotates and rounds as what it stands for; every family of models can be measured."""

import pytest
import torch

from megatron_anchor.precision.arms import ARMS
from megatron_anchor.precision.far import FirstTokenProbe
from megatron_anchor.precision.measurement import measure
from megatron_anchor.precision.models import LayeredModel, open_folder
from megatron_anchor.precision.products import Float32Products
from tests.conversion_models import MODELS, hugging_face_model
from tests.unit.test_precision_difference import COARSE

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3 moe")
SCALED = ("llama3 scaling, wide heads", "llama yarn, attention bias", "llama linear, all biases")


def saved(name, folder):
    model = hugging_face_model(name)
    model.save_pretrained(folder)
    return model


def text(length=48):
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [*FAMILIES, *SCALED])
def test_frequencies_are_transformers_bit_for_bit(name, tmp_path):
    model = saved(name, tmp_path)
    inv_freq_F, factor = open_folder(tmp_path).inverse_frequencies()
    assert torch.equal(inv_freq_F, model.model.rotary_emb.inv_freq)
    assert factor == model.model.rotary_emb.attention_scaling


@pytest.mark.parametrize("name", ["llama", "llama yarn, attention bias"])
def test_the_first_arm_rotates_as_transformers_bit_for_bit(name, tmp_path):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = saved(name, tmp_path)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 30, 8, generator=generator).bfloat16()
    positions_BS = torch.arange(30) + torch.tensor([[3], [1999]])
    cos, sin = model.model.rotary_emb(q, positions_BS)
    theirs, _ = apply_rotary_pos_emb(q, q, cos, sin)
    inv_freq_F, factor = open_folder(tmp_path).inverse_frequencies()
    ours = ARMS["bf16"].rotated(q, positions_BS, inv_freq_F, attention_factor=factor)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_with_our_attention_are_the_model(name, tmp_path):
    model = saved(name, tmp_path)
    tokens_S = text()
    with torch.no_grad():
        theirs = model.model(tokens_S[None], output_hidden_states=True).hidden_states[-2][0]
    layered = LayeredModel(open_folder(tmp_path), ARMS["float32"], seed=0, device="cpu")
    inputs = []
    layer = layered.layer
    layered.layer = lambda index, hidden, attend: (
        inputs.append(hidden) or layer(index, hidden, attend)
    )
    drift = measure(
        layered, ARMS["float32"], [tokens_S], shifts=(0,), reference_shift=16, states="shared"
    )
    torch.testing.assert_close(inputs[-1][0], theirs, atol=1e-4, rtol=1e-4)
    assert drift.totals[0] / drift.logits < 1e-5


@pytest.mark.parametrize(
    ("name", "states"), [*((name, "end-to-end") for name in FAMILIES), ("llama", "shared")]
)
def test_bf16_moves_attention_a_hundred_times_more_than_float32(name, states, tmp_path):
    saved(name, tmp_path)
    source, tokens_S = open_folder(tmp_path), text()
    totals = {}
    for arm in ("bf16", "bf16-rotate-float32", "float32", "float32-angles64"):
        model = LayeredModel(source, ARMS[arm], seed=0, device="cpu")
        drift = measure(
            model, ARMS[arm], [tokens_S], shifts=(0, 200), reference_shift=16, states=states
        )
        totals[arm] = drift.totals
    assert (totals["bf16"] > 100 * totals["float32"]).all()
    assert (totals["bf16-rotate-float32"] > 100 * totals["float32"]).all()
    assert (totals["float32-angles64"] <= 2 * totals["float32"]).all()


def test_random_weights_are_repeated_by_the_seed(tmp_path):
    saved("llama", tmp_path)
    source = open_folder(tmp_path)
    first, again, other = (
        LayeredModel(source, ARMS["random-bf16"], seed=seed, device="cpu").embed(text()[None])
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_products_in_float32_are_bf16_products_to_one_rounding():
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((9, 64), (32, 64), (32,)))
    theirs = torch.nn.functional.linear(x, w, b).float()
    with Float32Products():
        ours = torch.nn.functional.linear(x, w, bias=b)
        kept = torch.nn.functional.linear(x.float(), w.float())
    assert (ours.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    spacing = 2.0 ** (theirs.abs().clamp(min=1e-2).log2().floor() - 7)
    assert ((ours.float() - theirs).abs() <= spacing).all()


@pytest.mark.parametrize("arm", [ARMS["bf16"], COARSE], ids=["bf16", "coarse"])
def test_far_rows_inside_the_text_are_those_of_the_run(arm, tmp_path):
    """With as many samples as rows, the probe's D_logit is the measurement's."""
    saved("llama", tmp_path)
    source = open_folder(tmp_path)
    inv_freq_F, factor = source.inverse_frequencies()
    probe = FirstTokenProbe(arm, inv_freq_F, attention_factor=factor, shifts=(0, 16), reach=256)
    model = LayeredModel(source, arm, seed=0, device="cpu")
    drift = measure(
        model,
        arm,
        [text(256)],
        shifts=(0,),
        reference_shift=16,
        states="shared",
        probe=probe,
    )
    assert list(probe.lengths) == [64, 128, 256]
    found = probe.first_logit(texts=1)
    expected = [drift.first_logit_up_to(n)[0] for n in probe.lengths]
    assert found == pytest.approx(expected, rel=0.01 if arm.dtype == torch.bfloat16 else 1e-4)


def test_terms_of_frequencies_are_those_of_a_dense_product():
    """One head, one key: the difference of each pair's term, by complex numbers in float64."""
    generator = torch.Generator().manual_seed(0)
    q_HSD, k_GSD = (torch.randn(1, 64, 8, generator=generator) for _ in range(2))
    inv_freq_F = torch.tensor([1.0, 0.1, 0.01, 0.001])
    probe = FirstTokenProbe(
        ARMS["bf16"], inv_freq_F, attention_factor=1.0, shifts=(0, 16), reach=64
    )
    probe.add(q_HSD.bfloat16(), k_GSD.bfloat16(), scale=0.5)

    def terms(shift):
        def turned(x_SD, positions_S):
            angles = positions_S[:, None] * inv_freq_F
            cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
            first, second = x_SD.bfloat16().chunk(2, -1)
            real, imaginary = first * cos + -second * sin, second * cos + first * sin
            return torch.complex(real.double(), imaginary.double())

        q = turned(q_HSD[0], torch.arange(64) + shift)
        k = turned(k_GSD[0, :1], torch.tensor([shift]))
        return (q * k.conj()).real * 0.5

    expected = (terms(0) - terms(16)).abs().mean(0)
    first_key_OF, _ = probe.bands()
    assert first_key_OF[0] == pytest.approx(expected.numpy(), rel=1e-4)
    assert expected.min() > 0


def test_every_named_model_kind_is_known():
    assert set(FAMILIES) | set(SCALED) <= set(MODELS)
