"""Make a tiny random model of the same architecture and vocabulary as a Hugging Face model.

For a dry run of a recipe (TOY=1): only config.json and the tokenizer's files are read.

    python examples/recipe/shrink_model.py models/Llama-2-7b-hf work/tiny
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_anchor.checkpoint.pretrained import load_config
from megatron_anchor.checkpoint.tokenizer_files import copy_tokenizer
from megatron_anchor.whole_files import atomic_folder

HEADS, HEAD_DIM, LAYERS = 4, 16, 2


def shrink(source: Path, out: Path) -> None:
    """Write the model; grouped-query attention, biases, tying and RoPE stay as they are."""
    config = load_config(source)
    grouped = config.num_key_value_heads != config.num_attention_heads
    config.num_hidden_layers = LAYERS
    config.num_attention_heads = HEADS
    config.num_key_value_heads = HEADS // 2 if grouped else HEADS
    config.hidden_size = HEADS * HEAD_DIM
    config.intermediate_size = 2 * config.hidden_size
    config.head_dim = HEAD_DIM
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        copy_tokenizer(source, folder)
    print(f"{out}: {type(model).__name__}, {model.num_parameters():,} random parameters")


def main() -> None:
    """Parse and shrink."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with config.json and the tokenizer")
    parser.add_argument("out", type=Path, help="new folder")
    args = parser.parse_args()
    shrink(args.source, args.out)


if __name__ == "__main__":
    main()
