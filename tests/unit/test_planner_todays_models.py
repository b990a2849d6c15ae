"""Memory, work and traffic of experts, latents, windows and predictors, against sums by hand."""

import numpy as np
import pytest

from megatron_anchor.planner.communication import communication_of
from megatron_anchor.planner.gpus import GIB, find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import slimpajama_like
from megatron_anchor.planner.memory import budget, kept_by_layer, memory_of
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import Question, make_plan
from megatron_anchor.planner.samples import TILE, Samples, attention_work
from megatron_anchor.planner.stages import stage_sizes, stages_of
from megatron_anchor.planner.work import model_work, stage_work
from megatron_anchor.windows import FULL, LayerKind, LayerWindows, Window

S = 65536


def question(name, gpu="H100", gpus=64, length=S, batch=64, **more):
    lengths = slimpajama_like(3000)
    return Question(name, known_shape(name), lengths, find_gpu(gpu), gpus, length, batch, **more)


def test_states_of_qwen3_30b_a3b_by_hand():
    """8 of 128 experts on each of 16 ranks; the rest on all, its optimizer over all 64."""
    attention = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128
    plain = 48 * (attention + 2048 * 128 + 2 * 2048) + 2 * 151936 * 2048 + 2048
    experts = 48 * 8 * (3 * 2048 * 768)
    layout = Layout(cp=8, dp=8, ep=16)
    memory = memory_of(known_shape("qwen3-30b-a3b"), layout, sequence_length=S, global_batch=64)
    assert memory.weights == 2 * (plain + experts)
    assert memory.gradients == 4 * (plain + experts)
    assert memory.optimizer == 12 * (plain / 64 + experts / (64 / 16))


def test_activations_of_qwen3_30b_a3b_by_hand():
    """Bytes of a token and layer, bfloat16; softmax and router float32."""
    h, q, k, f = 2048, 32 * 128, 4 * 128, 768
    attention = 2 * (h + h) + 2 * (q + k) * 2 + 2 * (q + k + k) + 2 * q + 4 * 32
    experts = 2 * (h + h) + 8 * (2 * h + 2 * 3 * f) + 2 * 4 * 128
    shape = known_shape("qwen3-30b-a3b")
    assert kept_by_layer(shape, recompute="none", experts=True) == attention + experts
    assert kept_by_layer(shape, recompute="mlp", experts=True) == attention + 2 * (h + h)
    assert kept_by_layer(shape, recompute="full", experts=True) == 2 * h


def test_activations_of_deepseek_v3_by_hand():
    """Keys of 192 and values of 128 dimensions for each of 128 heads, and the latents twice."""
    h, q, k, v, f = 7168, 128 * 192, 128 * 192, 128 * 128, 2048
    latents = 2 * (1536 + 512)
    attention = 2 * (h + h) + 2 * latents + 2 * (q + k + v) + 2 * v + 4 * 128
    dense = 2 * (h + h) + 6 * 18432
    sparse = 2 * (h + h) + 8 * (2 * h + 6 * f) + 6 * f + 2 * 4 * 256
    shape = known_shape("deepseek-v3")
    assert kept_by_layer(shape, recompute="none") == attention + dense
    assert kept_by_layer(shape, recompute="none", experts=True) == attention + sparse
    exchanged = kept_by_layer(shape, recompute="none", experts=True, ulysses=8)
    assert exchanged == attention + sparse + 2 * v


def test_work_of_qwen3_30b_a3b_by_hand():
    attention, expert = 2048 * 128 * 72, 3 * 2048 * 768
    pairs = 12345.0
    work = model_work(known_shape("qwen3-30b-a3b"), sequence_length=S, pairs=pairs)
    assert work.experts == 6 * S * 48 * 8 * expert
    assert work.linear == 6 * S * (48 * (attention + 2048 * 128) + 151936 * 2048)
    assert work.attention == 3 * 48 * 32 * pairs * (2 * 128 + 2 * 128)


def test_work_of_deepseek_v3_by_hand():
    """61 layers and one predictor, which has an output layer of its own."""
    q = 7168 * 1536 + 1536 * 128 * 192
    kv = 7168 * 576 + 512 * 128 * (128 + 128)
    attention = q + kv + 128 * 128 * 7168
    expert = 3 * 7168 * 2048
    sparse = attention + expert + 7168 * 256  # one shared expert, the router
    dense = attention + 3 * 7168 * 18432
    output = 129280 * 7168
    pairs = 999.0
    work = model_work(known_shape("deepseek-v3"), sequence_length=S, pairs=pairs)
    linear = 3 * dense + 59 * sparse + 2 * output + 2 * 7168 * 7168
    assert work.linear == pytest.approx(6 * S * linear, rel=1e-12)
    assert work.experts == 6 * S * 59 * 8 * expert
    assert work.attention == 3 * 62 * 128 * pairs * (2 * 192 + 2 * 128)


def test_traffic_of_experts_by_hand():
    """Each token goes to 8 experts and comes back; so do the gradients; 7 of 8 leave the rank."""
    shape, sizes = known_shape("qwen3-30b-a3b"), {"sequence_length": S, "global_batch": 8}
    found = communication_of(shape, Layout(cp=8, dp=1, ep=8), **sizes)
    token = 2 * 2048
    assert found.experts == 8 * 48 * (S / 8) * 8 * token * (2 + 2) * 7 / 8
    again = communication_of(shape, Layout(cp=8, dp=1, ep=8, recompute="full"), **sizes)
    assert again.experts == found.experts * 6 / 4
    assert communication_of(shape, Layout(cp=8), **sizes).experts == 0
    # Gradients of an expert are summed over the ranks that have it: none at EP 8.
    attention = 2048 * 128 * 72 + 2 * 128
    plain = 48 * (attention + 2048 * 128 + 2 * 2048) + 2 * 151936 * 2048 + 2048
    assert found.data == pytest.approx(6 * plain * 7 / 8)


def test_tensor_parallelism_does_not_gather_for_experts_that_are_whole():
    sizes = {"sequence_length": 1024, "global_batch": 1}
    stream = 2048 * 1024 * 2 / 2
    routed = communication_of(known_shape("qwen3-30b-a3b"), Layout(tp=2), **sizes)
    assert routed.tensor == 48 * 5 * stream
    shared = communication_of(known_shape("deepseek-v2-lite"), Layout(tp=2), **sizes)
    assert shared.tensor == 27 * 10 * stream


def test_exchanged_heads_have_the_widths_of_latent_attention():
    shape, sizes = known_shape("deepseek-v3"), {"sequence_length": 1024, "global_batch": 1}
    found = communication_of(shape, Layout(cp=2), **sizes)
    one = 128 * (192 + 192 + 128 + 128) * 512 / 2  # q, k, v and the output; half leaves
    assert found.heads == 61 * 2 * 2 * one
    gathered = communication_of(shape, Layout(cp=2, cp_comm="gather"), **sizes)
    assert gathered.keys == 61 * 2 * 4 * (128 * (192 + 128) * 512)


SLOTS = np.array([1, 127, 128, 129, 511, 1500, 700, 1000])
WINDOWS = LayerWindows((LayerKind(Window(size=128), 2), LayerKind(None, 1)))


def visible(length, window):
    here = np.tril(np.ones((length, length), dtype=bool))
    return here if window is None else here & ~np.tril(here, -window)


@pytest.mark.parametrize("size", [1, 2, 100, 128, 129, 130, 1000, 5000])
def test_pairs_and_tiles_of_windows_are_those_of_the_mask(size):
    """A tile is computed if the mask leaves a pair in it, or the window's edge could."""
    windows = LayerWindows((LayerKind(Window(size=size), 2), LayerKind(None, 1)))
    total = int(SLOTS.sum())
    work = attention_work(
        Samples([SLOTS], 0.0), sequence_length=total, pattern="anchor", windows=windows
    )
    pairs = tiles = 0.0
    for length in SLOTS:
        for layers, window in ((2, size), (1, None)):
            mask = visible(length, window)
            pairs += mask.sum() * layers / 3
            side = -(-length // TILE) * TILE
            padded = visible(side, window)  # a kernel's last tile is whole
            blocks = padded.reshape(side // TILE, TILE, side // TILE, TILE).any(axis=(1, 3))
            tiles += blocks.sum() * layers / 3
    assert work.pairs == pytest.approx(pairs)
    assert work.tile_pairs == pytest.approx(tiles * TILE**2)


def test_parts_of_gathered_keys_see_windows_too():
    slots = np.array([8192, 8192])
    sizes = {"sequence_length": 16384, "pattern": "anchor"}
    samples = Samples([slots], 0.0)
    whole = attention_work(samples, windows=WINDOWS, **sizes)
    parts = attention_work(samples, windows=WINDOWS, parts=4, **sizes)
    full = attention_work(samples, parts=4, **sizes)
    assert whole.tile_pairs <= parts.tile_pairs < 1.3 * whole.tile_pairs
    assert parts.tile_pairs < 0.5 * full.tile_pairs
    assert parts.pairs == whole.pairs


def test_gpt_oss_has_half_of_its_layers_in_a_window():
    assert known_shape("gpt-oss-20b").windows == LayerWindows(
        (LayerKind(Window(size=128), 12), LayerKind(None, 12))
    )
    assert known_shape("qwen3-8b").windows == FULL
    work = question("gpt-oss-20b").work(Layout(), "full")
    assert work.pairs == (S * (S + 1) / 2 + 128 * 129 / 2 + (S - 128) * 128) / 2


def test_a_prime_number_of_layers_has_a_shorter_last_stage():
    assert stage_sizes(61, 4) == [16, 16, 16, 13]
    assert stage_sizes(61, 8) == [8] * 7 + [5]
    assert stage_sizes(8, 5) is None
    stages = stages_of(known_shape("deepseek-v3"), 4)
    assert [(s.dense, s.sparse, s.predictors) for s in stages] == [
        (3, 13, 0),
        (0, 16, 0),
        (0, 16, 0),
        (0, 13, 1),
    ]
    shape = known_shape("deepseek-v3")
    sizes = {"sequence_length": S, "pairs": 1e6}
    whole = model_work(shape, **sizes).total
    parts = [stage_work(shape, s, attention_backward=2.0, **sizes).total for s in stages]
    assert sum(parts) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus"),
    [("qwen3-30b-a3b", "H100", 32), ("gpt-oss-20b", "H100", 16), ("deepseek-v3", "H200", 512)],
)
def test_models_with_experts_have_a_plan_that_shares_them_out(name, gpu, gpus):
    asked = question(name, gpu, gpus)
    plan = make_plan(asked)
    best = plan.best
    assert best.layout.ep > 1
    assert best.layout.expert_ranks % best.layout.ep == 0
    assert best.memory.total <= budget(asked.gpu) < asked.gpu.memory_gib * GIB
    assert any("or EP" in r.reasons[0] for r in plan.refused)


def test_speed_by_hand():
    """MFU and tokens per second follow from the seconds of a step alone."""
    asked = question("llama-3-8b", gpus=8, batch=8)
    choice = asked.choice(Layout(cp=8))
    seconds = choice.time.total
    assert choice.tokens_per_second == pytest.approx(8 * S / seconds / 8)
    weights = 32 * (4096 * 128 * 80 + 3 * 4096 * 14336) + 128256 * 4096
    pairs = asked.work(Layout(cp=8)).pairs
    flops = 6 * S * weights + 3 * 32 * 4 * 4096 * pairs
    assert choice.mfu == pytest.approx(8 * flops / (seconds * 8 * 989e12))
    assert choice.days == pytest.approx(1e9 / (8 * S) * seconds / 86400)
