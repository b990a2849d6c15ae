"""What becomes of every key of a config.json: read, without effect, or only with some values.

The keys are those of transformers' config classes, 4.57 and 5.x, and those that other programs are
known to leave behind. A key without a row is refused, as long as nobody has looked what it does to
the model; tests/unit/test_hugging_face_keys.py walks the installed classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_anchor.checkpoint.names import names
from megatron_anchor.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"

READ = names(
    """
    architectures model_type quantization_config vocab_size hidden_size intermediate_size
    num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps
    max_position_embeddings tie_word_embeddings rope_theta rope_scaling rope_parameters
    partial_rotary_factor original_max_position_embeddings
    """
)
"""Of every family."""

READ_BY_FAMILY = {
    "llama": names("attention_bias mlp_bias"),
    "mistral": names("sliding_window"),
    "qwen2": frozenset(
        {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    ),
    "qwen3": names(
        "attention_bias use_sliding_window sliding_window max_window_layers layer_types"
    ),
    "smollm3": names(
        """
        attention_bias mlp_bias use_sliding_window sliding_window layer_types no_rope_layers
        no_rope_layer_interval
        """
    ),
    "mixtral": names(
        """
        sliding_window num_local_experts num_experts num_experts_per_tok router_aux_loss_coef
        """
    ),
    "gpt_oss": names(
        """
        attention_bias sliding_window layer_types num_local_experts num_experts num_experts_per_tok
        router_aux_loss_coef swiglu_limit swiglu_alpha
        """
    ),
    "qwen3_moe": names(
        """
        attention_bias use_sliding_window sliding_window moe_intermediate_size num_experts
        num_local_experts num_experts_per_tok norm_topk_prob router_aux_loss_coef
        decoder_sparse_step mlp_only_layers
        """
    ),
}
"""By model_type, in addition."""

WITHOUT_EFFECT = {
    "says who wrote the file, or how it is loaded": """
        transformers_version name_or_path _name_or_path _commit_hash dtype torch_dtype auto_map
        attn_implementation _attn_implementation _attn_implementation_autoset
        experts_implementation _experts_implementation transformers.js_config tokenizer_class
        is_llama_config megatron_anchor _flash_attn_2_enabled unsloth_fixed unsloth_version
        max_sequence_length
    """,
    "says what a call returns": """
        return_dict output_hidden_states output_attentions output_router_logits use_cache
        tie_last_hidden_states chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss
        is_decoder
    """,
    "names tokens": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    """,
    "says again what another key says, to other programs than transformers": """
        experts_per_token initial_context_length
    """,
    "of training": """
        initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop
        router_jitter_noise gradient_checkpointing neftune_noise_alpha
    """,
    "splits products of matrices, without another result": "pretraining_tp",
    "of classifiers": """
        id2label label2id num_labels problem_type finetuning_task task_specific_params
    """,
    "of generation": """
        max_length min_length max_new_tokens do_sample early_stopping num_beams temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens epsilon_cutoff
        eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule
        assistant_confidence_threshold assistant_lookbehind target_lookbehind num_beam_groups
        diversity_penalty
    """,
}
"""Reason to keys that may have any value."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "per_layer_config": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Keys of other families, or of all, to the values beside null with which the model is known."""

IN_ROPE = names(
    """
    rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast
    beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor short_factor
    long_factor partial_rotary_factor finetuned
    """
)
"""Keys inside rope_parameters or rope_scaling; all of them but the last are transformers'."""

_ANY_VALUE = names(*WITHOUT_EFFECT.values())


def read_keys(model_type: str) -> frozenset[str]:
    """Give the keys of a family that say which model it is."""
    return READ | READ_BY_FAMILY[model_type]


def kept_keys(model_type: str) -> frozenset[str]:
    """Give the keys that a config of a family may have beside those."""
    return (_ANY_VALUE | set(ONLY) | {"layer_types", "max_window_layers"}) - read_keys(model_type)


def check_keys(config: Mapping[str, Any], model_type: str) -> None:
    """Check that there is a row for every key, and that its value is one that is understood.

    Args:
        config: content of config.json.
        model_type: of its family.

    Raises:
        UserError: naming all that are not, with their values.
    """
    odd = [
        f"{key} {value!r}"
        for key, value in config.items()
        if value is not None and not _understood(key, value, model_type)
    ]
    for form in ("rope_parameters", "rope_scaling"):
        entries = config.get(form)
        if isinstance(entries, dict):
            odd += [
                f"{form}.{key} {value!r}"
                for key, value in entries.items()
                if value is not None and key not in IN_ROPE
            ]
    if odd:
        raise UserError(
            f"config.json: not supported for model_type {model_type!r}: {', '.join(odd)}; remove "
            "from a copy of config.json what the model does not depend on"
        )


def _understood(key: str, value: Any, model_type: str) -> bool:
    if key in read_keys(model_type) or key in _ANY_VALUE:
        return True
    if key == "max_window_layers":  # stands beside a window, and is read where that is
        return isinstance(value, int)
    if key == "layer_types":  # attention of these families has one window, or none, for all layers
        return isinstance(value, list) and all(kind == FULL for kind in value)
    return value in ONLY.get(key, ())
