"""The command that starts a plan, for `megatron_anchor.pretrain_gpt`."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megatron_anchor.checkpoint.extension import BASES, extended
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.errors import UserError
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.plan import Question
from megatron_anchor.shell_words import path_word, quoted

PLACES = {
    "MODEL": "models/hf",
    "START": "models/megatron",
    "DATA": "corpus/mine_text_document",
    "RUN": "run",
}
"""Shell variables of the command: the tokenizer's folder, the converted checkpoint, the corpus'
prefix, and the folder that the run is saved in and resumed from; a model's folder and a corpus that
the plan was asked about take their places."""

RECIPE = (
    "--lr 2e-5 --lr-decay-style constant --weight-decay 0.1",
    "--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0",
)
"""How the paper extends Llama-2-7B (arXiv 2411.13476, Table 1); the clipping is Megatron's default.
"""

RECOMPUTE_FLAGS = {
    "none": [],
    "mlp": ["--recompute-granularity selective --recompute-modules mlp"],
    "full": [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
}


def trained_model(model: Model, sequence_length: int) -> Model:
    """The model as it is trained: a longer context gets the paper's RoPE base where it has one."""
    if sequence_length <= model.positions:
        return model
    if sequence_length in BASES and not model.scaling:
        return extended(model, extend_to=sequence_length)
    return extended(model, positions=sequence_length)


def model_flags(model: Model) -> list[str]:
    """Megatron's flags for a model's shape; the converter's megatron_args.txt says the same."""
    base = _number(model.rotary_base)
    flags = [
        f"--num-layers {_number(model.layers)} --hidden-size {_number(model.hidden)} "
        f"--ffn-hidden-size {_number(model.ffn)}",
        f"--num-attention-heads {_number(model.heads)} --kv-channels {_number(model.head)}",
        f"--normalization RMSNorm --norm-epsilon {_number(model.epsilon)} --swiglu",
        f"--position-embedding-type rope --rotary-base {int(base) if base == int(base) else base}",
        f"--max-position-embeddings {_number(model.positions)}",
        "--attention-dropout 0.0 --hidden-dropout 0.0 --bf16",
        f"--vocab-size {_number(model.vocabulary)} "
        f"--padded-vocab-size {_number(model.padded_rows)}",
    ]
    if model.groups != model.heads:
        flags.append(f"--group-query-attention --num-query-groups {_number(model.groups)}")
    if model.scaling:
        scaling = json.dumps(model.scaling, separators=(",", ":"))
        flags.append(f"--rope-parameters {quoted(scaling)}")
    switches = {
        "--untie-embeddings-and-output-weights": model.untied,
        "--disable-bias-linear": not model.linear_bias,
        "--add-qkv-bias": model.qkv_bias and not model.linear_bias,
        "--qk-layernorm": model.qk_norm,
    }
    return [*flags, *(flag for flag, wanted in switches.items() if wanted)]


def _number(value: float) -> float:
    """Let only numbers of a config.json into a command.

    Raises:
        UserError: for anything else.
    """
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"the model's config.json holds {value!r} where a number is expected")
    return value


def layout_flags(layout: Layout) -> list[str]:
    """Megatron's flags for a layout."""
    flags = [
        f"--tensor-model-parallel-size {layout.tp}"
        + (" --sequence-parallel" if layout.tp > 1 else ""),
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}"
        + (f" --cp-comm-type {layout.cp_comm}" if layout.cp > 1 else "")
        + (
            f" --hierarchical-context-parallel-sizes {layout.heads_ranks} {layout.keys_ranks}"
            if layout.cp_comm == "a2a+gather"
            else ""
        ),
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ]
    return flags + RECOMPUTE_FLAGS[layout.recompute]


def launch_command(question: Question, layout: Layout, *, tokens: float = 1e9) -> str:
    """Write a shell script that trains so many tokens.

    Args:
        question: what is trained.
        layout: one of its plan's.
        tokens: to train on, for --train-iters.
    """
    steps = math.ceil(tokens / (question.sequence_length * question.global_batch))
    model = trained_model(question.model, question.sequence_length)
    nodes = max(1, question.gpus // question.gpu.per_node)
    processes = f"torchrun --nproc-per-node {min(question.gpus, question.gpu.per_node)}"
    if nodes > 1:
        processes += (
            f' --nnodes {nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" '
            "--master-port 29500"
        )
    lines = [
        f"{processes} -m megatron_anchor.pretrain_gpt",
        *model_flags(model),
        *layout_flags(layout),
        f"--attention-pattern {question.pattern}",
        f"--seq-length {question.sequence_length} --micro-batch-size 1 "
        f"--global-batch-size {question.global_batch} --train-iters {steps}",
        *RECIPE,
        '--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL"',
        '--data-path "$DATA" --split 100,0,0 --eval-iters 0 --eval-interval 1000',
        '--pretrained-checkpoint "$START" --load "$RUN" --save "$RUN" --save-interval 500',
        "--dist-ckpt-optim-fully-reshardable",
    ]
    known = {"DATA": question.lengths.prefix} if question.lengths.prefix else {}
    if Path(question.name).is_dir():
        known["MODEL"] = question.name
    places = [f"{name}={path_word(place)}" for name, place in (PLACES | known).items()]
    settings = ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    return "\n".join([*settings, *places, " \\\n    ".join(lines)])


def notes(question: Question, layout: Layout) -> list[str]:
    """What one has to know before starting the command."""
    found, model = [], question.model
    long = question.sequence_length > model.positions
    if long and (question.sequence_length not in BASES or model.scaling):
        found.append(
            f"--rotary-base stays {model.rotary_base:g}: the paper gives a base for plain RoPE at "
            f"{', '.join(map(str, BASES))} only; choose one for {question.sequence_length} tokens"
        )
    if layout.rings and question.gpu.capability < (9, 0):
        found.append(
            f"--cp-comm-type p2p on {question.gpu.name} needs flash-attn besides Transformer Engine"
        )
    return found
