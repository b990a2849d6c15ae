"""A real pretrained model there and back: SmolLM2-135M, continued under anchor attention.

Needs a folder with SmolLM2-135M-Instruct as safetensors and its tokenizer, named by the environment
variable MEGATRON_ANCHOR_SMOLLM2; docs/conversion.md says how to make it without a model hub.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import ARGS_FILE, convert_to_megatron
from tests.conversion_models import weights_of
from tests.distributed.pretraining import read_scalars
from tests.distributed.ranks import run_ranks

SMOLLM2 = os.environ.get("MEGATRON_ANCHOR_SMOLLM2", "")
S, STEPS = 2048, 3

pytestmark = pytest.mark.skipif(
    not SMOLLM2, reason="MEGATRON_ANCHOR_SMOLLM2 names no folder with SmolLM2-135M-Instruct"
)


def train(arguments):
    """Run the real program; give the documents of its first sample as the model saw them."""
    from megatron_anchor import pretrain_gpt
    from megatron_anchor.training import forward_step

    seen, get_batch = [], forward_step.get_batch

    def keep(*args, **kwargs):
        batch = get_batch(*args, **kwargs)
        fields = (batch.tokens, batch.labels, batch.loss_mask, batch.packed.position_ids_Bs)
        seen.append(([x[0].clone() for x in fields], batch.packed.document_lengths.tolist()))
        return batch

    forward_step.get_batch = keep
    torch.set_num_threads(2)
    sys.argv = ["pretrain_gpt", *arguments]
    pretrain_gpt.main()
    return seen[0]


def write_corpus(prefix, tokenizer):
    """Write short topics of Python's language reference, so that a sample holds several."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in pydoc_data.topics.topics.values():
        if len(text) > 3000:
            continue
        ids = tokenizer(text)["input_ids"]
        builder.add_document(torch.tensor([*ids, tokenizer.eos_token_id]), [len(ids) + 1])
    builder.finalize(f"{prefix}.idx")


def hugging_face_loss(folder, sample):
    """Give the mean loss, document by document at the positions that the sample says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (tokens, labels, mask, positions), lengths = sample
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for t, y, m, p in zip(
            *(x.split(lengths) for x in (tokens, labels, mask, positions)), strict=True
        ):
            logits = model(t[None], position_ids=p[None]).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
            total += (losses.double() * m.double()).sum()
    return float(total / mask.sum())


def test_a_real_model_is_converted_continued_and_exported(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(SMOLLM2)
    convert_to_megatron(source, tmp_path / "megatron", progress=False)
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "back", progress=False)
    before, back = weights_of(source), weights_of(tmp_path / "back")
    assert before.keys() == back.keys()
    assert all(torch.equal(before[name], back[name]) for name in before)

    write_corpus(tmp_path / "corpus", AutoTokenizer.from_pretrained(source))
    arguments = [
        *(tmp_path / "megatron" / ARGS_FILE).read_text().split(),
        *f"--load {tmp_path / 'megatron'} --save {tmp_path / 'run'} --save-interval 3".split(),
        *f"--data-path {tmp_path / 'corpus'} --data-cache-path {tmp_path / 'cache'}".split(),
        *f"--seq-length {S} --train-iters {STEPS} --micro-batch-size 1".split(),
        *["--global-batch-size", "1", "--lr", "1e-5", "--lr-decay-style", "constant"],
        "--no-save-optim",
        *["--transformer-impl", "local", "--distributed-backend", "gloo", "--split", "100,0,0"],
        *["--num-workers", "0", "--calculate-per-token-loss", "--attention-pattern", "anchor"],
        *["--log-interval", "1", "--tensorboard-log-interval", "1", "--eval-interval", "10"],
        *f"--eval-iters 0 --tensorboard-dir {tmp_path / 'board'} --no-one-logger".split(),
        *["--ckpt-format", "torch_dist"],
    ]
    [sample] = run_ranks(train, 1, arguments, timeout=1500)
    losses = read_scalars(tmp_path / "board")["lm loss"]
    expected = hugging_face_loss(source, sample)
    print(f"documents {len(sample[1])}, losses {losses}, Hugging Face {expected:.6f}")
    assert len(sample[1]) > 1
    assert abs(losses[1] - expected) < 1e-4

    convert_to_hugging_face(tmp_path / "run", tmp_path / "out", progress=False)
    after = weights_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 250
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    question = {"role": "user", "content": "What is the capital of France? Tell me about it."}
    prompt = tokenizer.apply_chat_template(
        [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    print(text)
    assert "Paris" in text
