"""Configs changed one field at a time: a model is converted to the same logits, or refused.

transformers builds a tiny random model from every config, saves it and reads it back; its logits
are the truth. What transformers itself cannot build or run must be refused.
"""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch

from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.hugging_face_keys import ONLY, WITHOUT_EFFECT
from megatron_anchor.checkpoint.megatron_model import gpt_model, load_weights, logits_of
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from megatron_anchor.errors import UserError
from tests.distributed.ranks import run_ranks

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 12,
}
OF_FAMILY = {
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window",),
    "qwen3": ("sliding_window",),
    "mixtral": ("sliding_window", "num_experts_per_tok", "num_local_experts"),
    "smollm3": ("sliding_window",),
    "gpt_oss": ("sliding_window", "num_experts_per_tok", "num_local_experts"),
    "qwen3_moe": (
        *("sliding_window", "num_experts_per_tok", "num_local_experts"),
        "moe_intermediate_size",
    ),
}
"""Entries of `BASE` that not all families have, by those that have them."""
SPECIAL = set().union(*OF_FAMILY.values())

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3},
        "truncate": False,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 0.8},
    {"rope_type": "llama3", "original_max_position_embeddings": 16, **LLAMA3},
    {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1], "long_factor": [2.0, 2]},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
]
WINDOWS = [
    {"sliding_window": 8},
    {"sliding_window": 8, "layer_types": [FULL, FULL]},
    {"sliding_window": 64},
    {"sliding_window": 0},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, SLIDING]},
    {
        **{"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, FULL]},
        "max_window_layers": 0,
    },
    {"use_sliding_window": False, "layer_types": [SLIDING, FULL]},
    {"layer_types": [FULL, "chunked_attention"]},
]
EXPERTS = [
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 1, "norm_topk_prob": True},
    {"num_experts_per_tok": 3, "norm_topk_prob": True},
    {"num_experts_per_tok": 4},
    {"num_experts_per_tok": 5},
    {"num_experts": 2},
    {"num_experts": 3, "num_local_experts": 3},
    {"num_local_experts": None, "num_experts": 3},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0]},
    {"moe_intermediate_size": 8},
    {"norm_topk_prob": False},
]
CHANGES = [
    {},
    *({"hidden_act": name} for name in ("swish", "gelu", "relu")),
    *({"num_key_value_heads": number} for number in (1, 4, 3, None)),
    *({"head_dim": number} for number in (8, None)),
    {"rms_norm_eps": 0.01},
    {"tie_word_embeddings": True},
    {"intermediate_size": 20, "vocab_size": 128},
    {"max_position_embeddings": 16},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": ROPES[3], "rope_parameters": ROPES[4]},
    {"partial_rotary_factor": 0.5},
    {"head_dim": 4, "rope_parameters": ROPES[4]},
    {"head_dim": 4, "rope_parameters": ROPES[3]},
    {"original_max_position_embeddings": 32, "rope_parameters": ROPES[4]},
    {"original_max_position_embeddings": 32, "rope_parameters": ROPES[6]},
    {"original_max_position_embeddings": 32, "rope_parameters": ROPES[3]},
    {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}},
    {"model_type": "smollm3"},
    {"attention_twist": 3},
    *({"rope_parameters": form} for form in ROPES),
    *WINDOWS,
]
ODD = {bool: True, int: 3, float: 0.5}
TOKENS = torch.randint(37, (24,), generator=torch.Generator().manual_seed(2))


def harmless_at_once():
    """Give every harmless key another value than any model has."""
    words = [word for text in WITHOUT_EFFECT.values() for word in text.split()]
    different = {"chunk_size_feed_forward": 1, "pretraining_tp": 2, "use_cache": False}
    different |= {"attention_dropout": 0.5, "router_jitter_noise": 0.3, "initializer_range": 0.7}
    different |= {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    different |= {"tie_last_hidden_states": True, "output_router_logits": True, "is_decoder": True}
    different |= {"torchscript": True, "use_bfloat16": True, "gradient_checkpointing": True}
    assert set(different) <= set(words)
    return different | {key: values[0] for key, values in ONLY.items() if values}


def cases(name):
    """Give the configs to try of a family."""
    family = FAMILIES[name]
    foreign = SPECIAL - set(OF_FAMILY[family.model_type])
    base = {key: value for key, value in BASE.items() if key not in foreign}
    base |= {"architectures": [name], "model_type": family.model_type}
    if family.sinks:
        base["sliding_window"] = 12  # transformers does not run gpt-oss without one
    changes = [*CHANGES, harmless_at_once(), *(EXPERTS if family.has_experts else ())]
    return [(change, base | change) for change in copy.deepcopy(changes)]


def truth(config, folder):
    """Build, save and read a model by transformers; give its logits, or None if it does not run."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[config["model_type"]]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind.from_dict(copy.deepcopy(config)))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(1.0, 0.2) if "norm" in name else weight.normal_(0.0, 0.4)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return their_logits(folder)
    except Exception:  # of any kind, from whatever reads the fields
        return None


def their_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS[None], use_cache=False, return_dict=True).logits[0]


def tried(name, root):
    """Convert every case; give (change, verdict) with the refusal or the two differences."""
    import torch.distributed as dist
    import transformers
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
    found = []
    for change, config in cases(name):
        shutil.rmtree(root, ignore_errors=True)
        (root / "hf").mkdir(parents=True)
        expected = truth(config, root / "hf")
        (root / "hf/config.json").write_text(json.dumps(config))
        found.append((change, verdict(root, expected)))
    return found


def verdict(root, expected):
    try:
        convert_to_megatron(root / "hf", root / "megatron", progress=False)
    except UserError as error:
        return str(error), expected is not None
    if expected is None:
        return "converted", "but transformers does not run it"
    convert_to_hugging_face(root / "megatron", root / "back", progress=False)
    with Files() as files:
        args = TorchDistCheckpoint(root / "megatron/release", files).args()
    gpt = gpt_model(args, rows=128, dtype=torch.float32).eval()
    load_weights(gpt, root / "megatron/release")
    ours = logits_of(gpt, TOKENS, stored=args)[:, : expected.shape[1]]
    again, spread = their_logits(root / "back"), float(expected.std())
    return [float((x - expected).abs().max()) / spread for x in (ours, again)]


def all_tried(root):
    return {name: tried(name, root / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(all_tried, 1, tmp_path_factory.mktemp("configs"))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_config_gives_the_same_logits_or_is_refused(name, found):
    converted = [(change, result) for change, result in found[name] if isinstance(result, list)]
    wrong = [(change, result) for change, result in converted if max(result) > 1e-4]
    assert not wrong, wrong
    assert len(converted) > 18, f"{name}: too much is refused to say anything"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_does_not_run_is_not_converted(name, found):
    assert [change for change, result in found[name] if result[0] == "converted"] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_refused_without_need(name, found):
    """What transformers runs and we refuse is something that training does not have."""
    has_not = (
        *("hidden_act 'gelu'", "hidden_act 'relu'", "attention_bias", "mlp_bias", "sliding_window"),
        *(
            "contradicts",
            "rope type",
            "is not supported",
            "not supported for model_type",
            "layer_types",
        ),
        *("num_experts_per_tok 1 with", "mlp_only_layers", "decoder_sparse_step", "two names"),
    )
    refused = [result[0] for _, result in found[name] if isinstance(result, tuple) and result[1]]
    assert [said for said in refused if not any(word in said for word in has_not)] == []
