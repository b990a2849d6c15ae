"""A small random Llama with a tokenizer of its own, as a Hugging Face folder.

It stands in for a model that you would download: every later step is the same.

    python examples/quickstart/small_model.py --text quickstart/text --out quickstart/model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cpu_demo"))

from byte_pairs import train_tokenizer

VOCABULARY = 2048


def main() -> None:
    """Train the tokenizer, write model and tokenizer into one folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="folder of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    files = sorted(args.text.glob("*.jsonl"))
    if not files:
        parser.error(f"--text {args.text}: no *.jsonl there; write some with cpu_demo/documents.py")
    train_tokenizer(args.out, files, vocab_size=VOCABULARY)
    parameters = write_random_llama(args.out)
    print(f"{args.out}: a random Llama of {parameters / 1e6:.1f} M parameters and its tokenizer")


def write_random_llama(folder: Path) -> int:
    """Write `config.json` and `model.safetensors`.

    Returns:
        The number of parameters.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            rope_theta=10000.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
