"""The command line of `tools/inspect_packing.py`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_anchor.command_line import make_parser
from megatron_anchor.compat import quiet_imports_without_gpu
from megatron_anchor.errors import UserError
from megatron_anchor.flags import add_flags
from megatron_anchor.indexed.manifest import read_manifest
from megatron_anchor.packing.anchor_token import choose_anchor
from megatron_anchor.packing.settings import PackingSettings
from megatron_anchor.terminal import say_block, say_json
from megatron_anchor.tokenizers import Tokenizer, load_tokenizer
from megatron_anchor.tokenizers.flags import add_tokenizer_arguments, tokenizer_config

if TYPE_CHECKING:
    from megatron_anchor.packing.dataset import PackedDataset

_EXAMPLE = """\
  python tools/inspect_packing.py corpus/all_text_document --seq-length 65536 \\
      --packing best-fit --png packing.png
  python tools/inspect_packing.py corpus/all_text_document --seq-length 65536 --sample 0 \\
      --tokenizer-model my-model"""


def parser() -> argparse.ArgumentParser:
    """All flags; those of training have the same names and meanings."""
    parser = make_parser("Show what a corpus becomes when it is packed.", _EXAMPLE)
    add = parser.add_argument
    add("prefix", help="the corpus, without .bin or .idx")
    add("--seq-length", type=int, required=True, help="slots of a sample")
    add("--document-list", metavar="FILE", help="documents of the epoch, with repetitions")
    add(
        *("--anchor-token", "--anchor-token-id"),
        metavar="{bos,eos,ID}",
        help="as in training; default: bos, else eos, of the tokenizer or the corpus' manifest",
    )
    add_flags(parser.add_argument_group("packing, as in training"), PackingSettings)
    add("--seed", type=int, default=1234)
    add("--data-cache-path", metavar="DIR", help="keep the index there; default: keep none")
    add("--sample", type=int, metavar="N", help="show sample N: positions, targets, text")
    add("--png", metavar="FILE", help="write a picture of lengths, samples, and sample N's mask")
    add("--json", action="store_true", help="print JSON")
    add_tokenizer_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, pack, print."""
    args = parser().parse_args(argv)
    with ExitStack() as stack:
        cache = args.data_cache_path or stack.enter_context(tempfile.TemporaryDirectory())
        return _run(args, cache)


def _run(args: argparse.Namespace, cache: str) -> int:
    quiet_imports_without_gpu()
    # Megatron takes many seconds to import, which --help and wrong flags need not wait for.
    from megatron_anchor.packing.inspection import (
        describe_sample,
        document_segments,
        format_sample,
        inspect_packing,
        table,
    )
    from megatron_anchor.packing.pictures import draw_packing

    tokenizer = _tokenizer(args)
    dataset = _dataset(args, cache, tokenizer)
    number = args.sample or 0
    if not 0 <= number < len(dataset):
        raise UserError(f"--sample {number}: there are the samples 0 to {len(dataset) - 1}")
    if args.sample is not None:
        decode = tokenizer.native_engine.decode if tokenizer else None
        rows = describe_sample(dataset, args.sample, decode=decode)
        say_json(rows) if args.json else say_block(format_sample(rows))
        if not args.png:
            return 0
    report = inspect_packing(dataset)
    if args.png:
        sample = dataset[number]
        draw_packing(
            args.png,
            report,
            number=number,
            cu_seqlens=sample["cu_seqlens"].numpy(),
            documents=document_segments(dataset, number),
        )
    if args.sample is None:
        say_json(asdict(report)) if args.json else say_block(table(report))
    return 0


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if not (args.tokenizer_model or args.tokenizer_type or args.vocab_file):
        if args.domain_tags:
            raise UserError("--domain-tags needs the tokenizer: give --tokenizer-model")
        return None
    return load_tokenizer(tokenizer_config(args))


def _anchor(args: argparse.Namespace, prefix: str, tokenizer: Tokenizer | None) -> int:
    facts: Any = tokenizer or read_manifest(prefix)
    anchor = choose_anchor(
        args.anchor_token, bos=facts and facts.bos_id, eos=facts and facts.eod_id
    )
    if anchor is None:
        raise UserError(
            f"{prefix} does not say what its {args.anchor_token or 'bos or eos'} is: give "
            "--tokenizer-model, or a token id with --anchor-token"
        )
    return anchor


def _dataset(args: argparse.Namespace, cache: str, tokenizer: Tokenizer | None) -> PackedDataset:
    """One epoch of the whole corpus."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig

    if not 0 <= args.seed < 1 << 32:
        raise UserError(f"--seed {args.seed}: expected 0 to {(1 << 32) - 1}")
    prefix = args.prefix.removesuffix(".idx").removesuffix(".bin")
    vocab_size = tokenizer.vocab_size if tokenizer else None
    stand_in = SimpleNamespace(vocab_size=vocab_size or 1 << 31)
    if tokenizer:
        stand_in.tokenize = lambda text: tokenizer.native_engine.encode_batch([text])[0].tolist()
    given = {f.name: getattr(args, f.name) for f in fields(PackingSettings)}
    config = PackedDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=stand_in,
        anchor_token_id=_anchor(args, prefix, tokenizer),
        vocab_size=vocab_size,
        document_lists={"": args.document_list} if args.document_list else None,
        **given,
    )
    builder = BlendedMegatronDatasetBuilder(PackedDataset, [None] * 3, lambda: True, config)
    return builder.build()[0]
