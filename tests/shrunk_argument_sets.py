"""Megatron's own argument sets, made small and trained for two steps on CPUs.

What a set combines stays (kinds of parallelism, experts, optimizer, precision, recomputation,
schedule); sizes, files and what only a GPU has do not.
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from tests.distributed.pretraining import EOD, VOCAB, read_scalars, write_corpus
from tests.distributed.ranks import run_ranks
from tests.host_argument_sets import ArgumentSet

Flags = dict[str, list[str]]

STEPS = 2
MOST_RANKS = 8
FIM_TOKENS = {"prefix": 120, "suffix": 121, "middle": 122, "eod": EOD}
SIZES = {
    "--hidden-size": "64",
    "--ffn-hidden-size": "96",
    "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "32",
    "--num-attention-heads": "8",
    "--num-query-groups": "4",
    "--kv-channels": "8",
    "--q-lora-rank": "24",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "16",
    "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "16",
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--mup-base-hidden-size": "32",
    "--make-vocab-size-divisible-by": "16",
    "--lr-decay-iters": "8",
    "--lr-decay-samples": "64",
    "--lr-warmup-samples": "0",
    "--eval-interval": "1000",
    "--eval-iters": "0",
    "--log-interval": "1",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-virtual-stages-per-pipeline-rank": "2",
    "--microbatch-group-size-per-virtual-pipeline-stage": "2",
    "--decoder-first-pipeline-num-layers": "1",
    "--decoder-last-pipeline-num-layers": "1",
    "--error-injection-rate": "0",
    "--num-workers": "0",
    "--transformer-impl": "local",
    "--distributed-backend": "gloo",
    "--split": "100,0,0",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": str(VOCAB - 1),
}
"""Flag to its value here, where a set names it."""

AT_MOST = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2,
    "--expert-tensor-parallel-size": 4,
    "--micro-batch-size": 2,
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--moe-router-num-groups": 4,
    "--moe-router-group-topk": 2,
    "--num-distributed-optimizer-instances": 1,
}
NOT_HERE = """
    --data-cache-path --load --merge-file --vocab-file --tokenizer-model --tensorboard-dir
    --save --save-interval --save-retain-interval --async-save --async-strategy
    --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm --verify-integrity
    --ckpt-assume-constant-structure --ckpt-fully-parallel-load --ckpt-fully-parallel-save
    --no-ckpt-fully-parallel-save --dist-ckpt-strictness --dist-ckpt-optim-fully-reshardable
    --auto-detect-ckpt-format --finetune --no-load-optim --use-checkpoint-opt_param-scheduler
    --override-opt_param-scheduler --exit-interval --exit-duration-in-mins
    --eval-global-batch-size --wandb-project --wandb-entity --wandb-exp-name --wandb-save-dir
    --log-memory-to-tensorboard --log-timers-to-tensorboard --timing-log-level
    --distributed-timeout-minutes
"""
"""Files and checkpoints, other programs' accounts, and what needs a run of before."""

GPU_ONLY = """
    --attention-backend --fp8-format --fp8-recipe --fp8-param-gather --first-last-layers-bf16
    --tp-comm-overlap --tp-comm-overlap-cfg --moe-permute-fusion --moe-router-fusion
    --moe-flex-dispatcher-backend --delay-wgrad-compute --use-transformer-engine-op-fuser
    --apply-layernorm-1p --te-rng-tracker --fine-grained-activation-offloading --offload-modules
    --cp-comm-type --hierarchical-context-parallel-sizes --defer-embedding-wgrad-compute
    --wgrad-deferral-limit --optimizer --muon-momentum --muon-extra-scale-factor --muon-scale-mode
"""
"""What a GPU, Transformer Engine or a package that is not pinned (emerging-optimizers) has."""


class Shrunk(NamedTuple):
    """A small command line."""

    words: list[str]
    ranks: int
    left_out: list[str]
    """Flags of the set that only a GPU or Transformer Engine can serve."""


class Trained(NamedTuple):
    """How a small run ended."""

    losses: list[float]
    """Loss of each step; empty: it did not get there."""
    why_not: str


def shrink(one: ArgumentSet) -> Shrunk:
    """Make a set small enough for a few processes on two cores."""
    flags = _flags(one.words)
    left_out = [flag for flag in GPU_ONLY.split() if flag in flags]
    for flag in [*NOT_HERE.split(), *left_out]:
        flags.pop(flag, None)
    flags |= {flag: [value] for flag, value in SIZES.items() if flag in flags}
    for flag, limit in AT_MOST.items():
        if flag in flags:
            flags[flag] = [str(min(limit, int(flags[flag][0])))]
    _set_stages(flags)
    if flags.get("--moe-token-dispatcher-type") == ["flex"]:
        flags["--moe-token-dispatcher-type"] = ["alltoall"]
    if flags.get("--ckpt-format") == ["torch_dist"]:
        del flags["--ckpt-format"]  # the default; others go with other flags
    if "--fim-data" in flags:
        flags |= {f"--fim-{part}-token": [str(token)] for part, token in FIM_TOKENS.items()}
    if "--use-megatron-fsdp" in flags:
        flags["--no-gradient-reduce-div-fusion"] = []  # gloo reduces no products
    _set_expert_shares(flags)
    ranks = _ranks(flags)
    _set_batches(flags, ranks)
    flags |= {flag: [SIZES[flag]] for flag in ("--tokenizer-type", "--vocab-size", "--num-workers")}
    flags["--position-embedding-type"] = ["rope"]
    flags |= {flag: [SIZES[flag]] for flag in ("--transformer-impl", "--distributed-backend")}
    return Shrunk(_words(flags), ranks, left_out)


def fingerprint(small: Shrunk) -> str:
    """The same for sets that differ in order alone."""
    flags = sorted(_flags(small.words).items())
    return hashlib.sha256(repr(flags).encode()).hexdigest()[:12]


def train(small: Shrunk, corpus: Path, *, timeout: float = 240.0) -> Trained:
    """Train two steps."""
    with tempfile.TemporaryDirectory() as folder:
        flags = _flags(small.words) | {"--data-path": [str(corpus)]}
        flags |= {"--tensorboard-dir": [f"{folder}/curves"]}
        flags |= {"--tensorboard-log-interval": ["1"], "--no-one-logger": []}
        try:
            ends = run_ranks(_run, small.ranks, _words(flags), timeout=timeout)
        except RuntimeError as error:
            return Trained([], str(error).strip().splitlines()[-1])
        said = next((said for said in ends if said), "")
        if said:
            return Trained([], said)
        losses = read_scalars(Path(folder, "curves")).get("lm loss", {})
        return Trained([losses[step] for step in sorted(losses)], "")


def _run(words: list[str]) -> str:
    """One rank; what it said if it ended by itself."""
    from megatron_anchor import pretrain_gpt

    pretrain_gpt.SECONDS_FOR_THE_REASON = 0
    sys.argv = ["pretrain_gpt", *words]
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()):
        try:
            pretrain_gpt.main()
        except SystemExit as end:
            if end.code:
                return said.getvalue().strip().splitlines()[-1]
    return ""


def _flags(words: list[str]) -> Flags:
    flags: Flags = {}
    for word in words:
        if word.startswith("--"):
            last = flags.setdefault(word, [])
            last.clear()
        else:
            last.append(word)
    return flags


def _words(flags: Flags) -> list[str]:
    return [word for flag, values in flags.items() for word in (flag, *values)]


def _number(flags: Flags, flag: str) -> int:
    return int(flags.get(flag, ["1"])[0])


def _set_stages(flags: Flags) -> None:
    """Layers for every stage, and stages that are named by layers."""
    stages = _number(flags, "--pipeline-model-parallel-size")
    layout = flags.get("--pipeline-model-parallel-layout", [""])[0]
    interleaved = layout.count("|") + 1 > stages and "(" in layout
    interleaved |= "--num-layers-per-virtual-pipeline-stage" in flags
    interleaved |= "--num-virtual-stages-per-pipeline-rank" in flags
    layers = stages * 2 if interleaved else max(2, stages)
    if layout:
        middle = "|t" * (layers - 1)
        flags["--pipeline-model-parallel-layout"] = [f"Et{middle}{'m' * ('m' in layout)}L"]
    if "--account-for-embedding-in-pipeline-split" in flags:
        layers += 2 * interleaved
    flags["--num-layers"] = [str(layers)]
    if "--moe-layer-freq" in flags:
        flags["--moe-layer-freq"] = [f"([0]*1+[1]*{layers - 1})"]


def _set_expert_shares(flags: Flags) -> None:
    """Tensor parallelism of experts for which there are ranks, in an order that Megatron allows."""
    flag = "--expert-tensor-parallel-size"
    if "--use-tp-pp-dp-mapping" in flags and flag in flags:
        tp, cp, ep = (
            _number(flags, f"--{kind}-parallel-size")
            for kind in ("tensor-model", "context", "expert-model")
        )
        flags[flag] = [str(max(1, tp * cp // ep))]
    elif _ranks(flags) > MOST_RANKS:
        flags[flag] = ["2"]


def _ranks_of_a_model(flags: Flags) -> int:
    return math.prod(
        _number(flags, f"--{kind}-parallel-size")
        for kind in ("tensor-model", "pipeline-model", "context")
    )


def _ranks(flags: Flags) -> int:
    expert = math.prod(
        (
            _number(flags, "--pipeline-model-parallel-size"),
            _number(flags, "--expert-model-parallel-size"),
            _number(
                flags,
                "--expert-tensor-parallel-size"
                if "--expert-tensor-parallel-size" in flags
                else "--tensor-model-parallel-size",
            ),
        )
    )
    return max(2, math.lcm(_ranks_of_a_model(flags), expert))


def _set_batches(flags: Flags, ranks: int) -> None:
    """Four micro-batches for every copy of the model, and as many samples as all steps take."""
    batch = 4 * (ranks // _ranks_of_a_model(flags)) * _number(flags, "--micro-batch-size")
    if "--step-batch-size-schedule" in flags:
        flags["--step-batch-size-schedule"] = [f"0:{batch} {128 * batch}:{2 * batch}"]
        flags.pop("--global-batch-size", None)
    else:
        flags["--global-batch-size"] = [str(batch)]
    if "--train-samples" in flags:
        flags["--train-samples"] = [str(STEPS * batch)]
    else:
        flags["--train-iters"] = [str(STEPS)]


def corpus_for_all(folder: Path) -> Path:
    """Documents of all kinds of lengths."""
    assert EOD == 0
    return write_corpus(folder / "corpus", [(7 * number) % 90 + 1 for number in range(120)])
