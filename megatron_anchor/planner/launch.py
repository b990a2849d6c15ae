"""The command that starts a plan, for `megatron_anchor.pretrain_gpt`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from megatron_anchor.checkpoint.extension import BASES, extended
from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.megatron_args import flag_lines, shape_values
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.plan import Question
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import stage_sizes
from megatron_anchor.shell_words import path_word

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

WIDTH = 90
"""Characters of a line of the command, as far as single flags leave the choice."""


def trained_shape(shape: Shape, sequence_length: int) -> Shape:
    """The model as it is trained: a longer context gets the paper's RoPE base where it has one."""
    model = shape.model
    if sequence_length <= model.positions:
        return shape
    if sequence_length in BASES and not model.scaling:
        model = extended(model, extend_to=sequence_length)
    else:
        model = extended(model, positions=sequence_length)
    return dataclasses.replace(shape, model=model)


def model_flags(shape: Shape) -> list[str]:
    """Megatron's flags for a model, several to a line, by the function that the converter uses.

    Raises:
        UserError: for something in its config.json that is no number where one is needed.
    """
    values = shape_values(shape.model) | dict(shape.arguments) | {"bf16": True}
    lines: list[str] = []
    for flag in flag_lines(values, for_shell=True):
        if lines and len(lines[-1]) + 1 + len(flag) <= WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return lines


def layout_flags(layout: Layout, shape: Shape) -> list[str]:
    """Megatron's flags for a layout of a model."""
    sizes = stage_sizes(shape.layers, layout.pp) or [0]
    flags = [
        f"--tensor-model-parallel-size {layout.tp}"
        + (" --sequence-parallel" if layout.tp > 1 else ""),
        f"--pipeline-model-parallel-size {layout.pp}"
        + (f" --decoder-last-pipeline-num-layers {sizes[-1]}" if sizes[-1] != sizes[0] else ""),
        f"--context-parallel-size {layout.cp}"
        + (f" --cp-comm-type {layout.cp_comm}" if layout.cp > 1 else "")
        + (
            f" --hierarchical-context-parallel-sizes {layout.heads_ranks} {layout.keys_ranks}"
            if layout.cp_comm == "a2a+gather"
            else ""
        ),
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ]
    if shape.experts is None:
        return flags + RECOMPUTE_FLAGS[layout.recompute]
    flags += [
        f"--expert-model-parallel-size {layout.ep} --expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm",
    ]
    if layout.recompute == "mlp":
        return [*flags, f"{RECOMPUTE_FLAGS['mlp'][0]} moe"]
    return flags + RECOMPUTE_FLAGS[layout.recompute]


def launch_command(question: Question, layout: Layout, *, tokens: float = 1e9) -> str:
    """Write a shell script that trains so many tokens.

    Args:
        question: what is trained.
        layout: one of its plan's.
        tokens: to train on, for --train-iters.
    """
    steps = math.ceil(tokens / (question.sequence_length * question.global_batch))
    shape = trained_shape(question.shape, question.sequence_length)
    nodes = max(1, question.gpus // question.gpu.per_node)
    processes = f"torchrun --nproc-per-node {min(question.gpus, question.gpu.per_node)}"
    if nodes > 1:
        processes += (
            f' --nnodes {nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" '
            "--master-port 29500"
        )
    lines = [
        f"{processes} -m megatron_anchor.pretrain_gpt",
        *model_flags(shape),
        *layout_flags(layout, shape),
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
    found, model = [], question.shape.model
    long = question.sequence_length > model.positions
    if long and (question.sequence_length not in BASES or model.scaling):
        found.append(
            f"--rotary-base stays {model.rotary_base:g}: the paper gives a base for plain RoPE at "
            f"{', '.join(map(str, BASES))} only; choose one for {question.sequence_length} tokens"
        )
    if model.family not in FAMILIES:
        found.append(
            f"the converter does not read {model.family} yet: START must be a Megatron checkpoint "
            "from elsewhere; without one leave --pretrained-checkpoint out and train from scratch"
        )
    if layout.rings and question.gpu.capability < (9, 0):
        found.append(
            f"--cp-comm-type p2p on {question.gpu.name} needs flash-attn besides Transformer Engine"
        )
    return found
