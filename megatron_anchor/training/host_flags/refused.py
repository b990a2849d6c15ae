"""Megatron's arguments that are refused: why, and what to do instead.

Names are those of Megatron's namespace; messages begin with the flag as it is typed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

_CUDA_GRAPHS = (
    "the number of documents changes with every sample, a captured graph cannot follow; leave it "
    "out"
)
_HYBRID = "this program builds GPT models; train hybrid models with Megatron's pretrain_hybrid.py"
_HETEROGENEOUS = (
    "layers of different shapes have their own layer spec; train such a model with Megatron's own "
    "pretrain_gpt.py"
)
_FRAGMENTS = (
    "--fim-data rearranges whole documents here; make every fragment a document of the corpus and "
    "leave it out"
)
_KITCHEN = "never run with packed documents; leave it out"

REFUSED: dict[str, str] = {
    # Attention that would take the place of this package's, or that the kernels do not have.
    "experimental_attention_variant": "it would replace this package's attention; train such a "
    "model with Megatron's own pretrain_gpt.py",
    "linear_attention_freq": "linear-attention layers are not built here, but checkpoints would be "
    "written as if they were; leave it out",
    "use_kitchen_attention": "it would replace this package's attention; leave it out",
    "batch_invariant_mode": "it pins the kernels of Megatron's own attention, which is not called "
    "here; leave it out",
    "spec": "the layer spec is ours; in your own program take "
    "megatron_anchor.attention.layer_spec.anchor_block_spec",
    "heterogeneous_layers_config_path": _HETEROGENEOUS,
    "heterogeneous_layers_config_encoded_json": _HETEROGENEOUS,
    "hybrid_layer_pattern": _HYBRID,
    "hybrid_override_pattern": _HYBRID,
    "cache_mla_latents": "it is for inference; leave it out",
    "mtp_detach_heads": "its gradients, cut off and clipped apart, were never compared with "
    "anything here; leave it out",
    # Data: samples are packed here.
    "mock_data": "packing needs real documents; `make demo` builds a small corpus",
    "sft": "its dataset packs by itself; use a plain .bin/.idx corpus",
    "fim_split_sample": _FRAGMENTS,
    "fim_fragment_rate": _FRAGMENTS,
    "fim_no_prefix": "it looks at text, and --fim-data rearranges tokens here; leave such "
    "documents out of the corpus, or leave it out",
    "reset_position_ids": "use --attention-pattern intra-document-reset",
    "reset_attention_mask": "use --attention-pattern intra-document",
    "dataloader_inter_document_masking": "--attention-pattern intra-document-reset is that mask, "
    "with right positions under context parallelism",
    "hybrid_context_parallel": "use --context-parallel-size with --cp-comm-type a2a",
    "decoder_seq_length": "it is for encoder-decoder models, and pipelines would take the shape of "
    "what they send from it; leave it out (the length is --seq-length)",
    "vision_pretraining": "this program trains on text; leave it out",
    "perform_rl_step": "reinforcement learning has its own data path; use Megatron's train_rl.py",
    "rl_profile": "Megatron has this profiler in its train_rl.py only; leave it out",
    # Distillation reads and writes logits of Megatron's own samples.
    "logits_load_dir": "distillation from cached logits is not implemented: they belong to the "
    "slots of Megatron's own samples, and the loss here reads none; leave it out, or distil with "
    "Megatron's own pretrain_gpt.py",
    "logits_save_dir": "the logits would be those of packed samples under a name that Megatron's "
    "own samples have, and nothing reads them back here; write them with Megatron's own "
    "pretrain_gpt.py",
    # Graphs, schedules and sharding around the layers.
    "cuda_graph_impl": _CUDA_GRAPHS,
    "enable_cuda_graph": _CUDA_GRAPHS,
    "external_cuda_graph": _CUDA_GRAPHS,
    "use_torch_fsdp2": "never run with packed documents; use --use-megatron-fsdp, or "
    "--use-distributed-optimizer",
    "tensor_parallel_num_weight_shards": "sharding weights besides tensor parallelism was never "
    "run with packed documents; leave it out",
    "expert_tensor_parallel_num_weight_shards": "sharding weights besides tensor parallelism was "
    "never run with packed documents; leave it out",
    "inprocess_restart": "restarts inside the process are not wired into this program; let "
    "torchrun --max-restarts or the scheduler start it again (docs/reliability.md)",
    # What Megatron 0.19.2 would not do although it takes the flag, or breaks on.
    "freeze_all_layers": "Megatron 0.19.2 freezes nothing in a model that is built from a config: "
    "all weights would be trained; leave it out",
    "moe_use_upcycling": "Megatron 0.19.2 cannot upcycle a model that is built from a config; "
    "upcycle with an older Megatron and --load the result",
    "init_model_with_meta_device": "Megatron fills such weights under FSDP only, and training "
    "would begin with NaN; leave it out",
    "init_method_xavier_uniform": "Megatron 0.19.2 ends with a TypeError on it; use "
    "--init-method-std",
    "config_logger_dir": "Megatron 0.19.2 ends with a TypeError when it writes its process groups; "
    "leave it out (the log lists all arguments)",
    "lazy_mpu_init": "it leaves the process groups to another program; leave it out",
    "yaml_cfg": "pass the arguments on the command line",
    "kitchen_config_file": _KITCHEN,
    "kitchen_recipe_number": _KITCHEN,
    # Names that Megatron has given up; its own refusal is an assertion, or status 0.
    "batch_size": "Megatron removed it; use --micro-batch-size",
    "warmup": "Megatron removed it; use --lr-warmup-fraction",
    "model_parallel_size": "Megatron removed it; use --tensor-model-parallel-size",
    "checkpoint_activations": "Megatron removed it; use --recompute-activations, or "
    "--recompute-granularity with --recompute-method",
}
"""Argument to the reason why it is refused wherever it is set, and the remedy."""

REFUSED_VALUES: dict[str, dict[Any, str]] = {
    "transformer_impl": {
        "inference_optimized": "it is for inference; use transformer_engine or local"
    },
    "attention_backend": {
        "local": "it asks for Megatron's own attention; leave it out (kernels are chosen with "
        "--anchor-attention-backend)"
    },
    "dataloader_type": {"external": "packed datasets are no data loaders; use single or cyclic"},
    "tokenizer_type": {
        "MultimodalTokenizer": "this program trains on text; name another",
        "NullMultimodalTokenizer": "this program trains on text; name another",
        "SFTTokenizer": "it is for --sft, which is refused; name the tokenizer of the corpus",
    },
    "ckpt_format": {"torch_dcp": "it is for --use-torch-fsdp2, which is refused; use torch_dist"},
    "rerun_mode": {
        "report_stats": "Megatron 0.19.2 ends with a ValueError on it; use validate_results"
    },
    "cuda_graph_modules": dict.fromkeys(
        ("full", "full_iteration", "full_iteration_inference"), _CUDA_GRAPHS
    ),
    "cuda_graph_scope_deprecated": dict.fromkeys(
        ("full", "full_iteration", "full_iteration_inference"), _CUDA_GRAPHS
    ),
}
"""Argument that is carried or without effect to those of its values that are refused."""

NEEDS_ITS_LAYERS: dict[str, str] = {
    "fp8": "no other layers compute in FP8",
    "fp4": "no other layers compute in FP4",
    "te_precision_config_file": "no other layers read it",
    "use_te_activation_func": "no other layers have these functions",
    "fp32_residual_connection": "other layers stop at a residual of another dtype",
    "tp_comm_overlap": "no other layers overlap communication",
    "symmetric_ar_type": "no other layers reduce like this",
    "delay_wgrad_compute": "no other layers delay their weight gradients",
    "overlap_dispatch_backward_with_experts_wgrad": "no other layers delay their weight gradients",
}
"""Argument that is carried with --transformer-impl transformer_engine only, to the reason."""

NEEDS_TRANSFORMER_ENGINE: dict[str, str] = {
    "cpu_offloading_num_layers": "Megatron offloads through it",
    "moe_permute_fusion": "it has the fused kernel",
    "moe_router_fusion": "it has the fused kernel",
    "moe_latent_size": "it has the projections",
    "use_precision_aware_optimizer": "it has the optimizer",
    "save_activations_interval": "Megatron ends with a TypeError without it",
    "save_dgrads_interval": "Megatron ends with a TypeError without it",
}
"""Argument that is carried where Transformer Engine is installed, to the reason."""

HARMLESS: dict[str, Callable[[Namespace], Any]] = {
    "tensor_parallel_num_weight_shards": lambda args: args.tensor_model_parallel_size,
    "expert_tensor_parallel_num_weight_shards": lambda args: (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ),
    "decoder_seq_length": lambda args: args.seq_length or args.encoder_seq_length,
}
"""Refused argument to a value that means the same as leaving it out."""
