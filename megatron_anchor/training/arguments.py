"""Our command-line flags: one frozen dataclass, from which Megatron's parser builds the flags.

Annotations stay evaluated in this module: Megatron's factory reads them as types.
"""

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megatron_anchor import compat
from megatron_anchor.attention.backends.request import TRANSFORMER_ENGINE, ULYSSES
from megatron_anchor.packing.interleave import Interleaving

ANCHOR_TOKEN_FLAGS = ["--anchor-token", "--anchor-token-id"]


@dataclass(frozen=True, kw_only=True)
class AnchorArguments:
    """Packed documents with a shared anchor (megatron_anchor)."""

    attention_pattern: str = "anchor"
    """What a token sees: 'anchor' (its document and the anchor, positions run on through the
    sample), 'intra-document' (its document, positions run on), 'intra-document-reset' (its
    document, positions restart), 'full' (everything before it), or, as a control, 'anchor-masked'
    (as 'anchor', but only the sample's first document sees the anchor)."""

    anchor_token: str | None = field(
        default=None, metadata={"argparse_meta": {"arg_names": ANCHOR_TOKEN_FLAGS, "type": str}}
    )
    """Token that stands at the head of every document: 'bos' or 'eos' of the tokenizer, or a token
    id. Default: its bos, else its eos."""

    anchor_position: int = 0
    """Position id of the anchor under the patterns 'anchor' and 'anchor-masked'."""

    anchor_first_token_loss: bool = True
    """Leave the first token of every document out of the loss, which the anchor predicts."""

    packing: Literal["concat", "best-fit"] = "concat"
    """How documents become samples: 'concat' cuts a document where a sample ends; 'best-fit' cuts
    none that fits in a sample, and pads what is left."""

    document_alignment: int | None = None
    """Fill every document up to a multiple of so many slots. It is part of the sample index: set it
    to continue a run at another context-parallel size with the same samples. Default: 1, or twice
    the context-parallel size where Transformer Engine splits documents."""

    document_list: list[str] | None = None
    """Documents of the training epoch, with repetitions, as tools/upsample_long_documents.py writes
    them: LIST.npy for a single corpus, CORPUS_PREFIX=LIST.npy for each of several."""

    domain_tags: bool = False
    """Put the name of a document's domain behind its anchor: visible to the document, never a
    target. Needs a corpus with domains (tools/preprocess_data.py --domain-key)."""

    domain_tag_format: str = "{domain}: "
    """Text of the tag."""

    interleave_chunks: bool = False
    """Split the documents of a sample at random into chunks and shuffle these, in order inside each
    document. The paper found it harmful together with masked attention."""

    interleave_max_chunks: int = 8
    """Chunks of a document in a sample, at most."""

    interleave_min_chunk_length: int = 16
    """Slots of a chunk, at least; shorter documents stay whole."""

    interleave_max_chunk_length: int | None = None
    """Slots of a chunk, at most; longer documents get as many chunks as that takes, be they more
    than --interleave-max-chunks. Default: no bound."""

    balance_attention_work: bool = False
    """Order the samples inside each global batch so that data-parallel ranks and micro-batches have
    nearly equal attention work. The batch's samples stay the same."""

    allow_model_change: list[str] | None = None
    """Flags in which this run's model may differ from that of the checkpoint it loads, without
    dashes, such as norm-epsilon. Lengths, rotary positions, patterns, dropout, precision and losses
    may differ anyway."""

    save_last: int | None = None
    """Keep so many checkpoints of the end of training, --save-last-every iterations apart, besides
    those of --save-interval: to average an evaluation over them."""

    save_last_every: int | None = None
    """Iterations from one checkpoint of --save-last to the next. Default: 10."""

    attention_precision: Literal["model", "fp32"] = "model"
    """Precision of the attention core: the model's, or float32 from the rotation to the output."""

    anchor_attention_backend: str = "auto"
    """Attention kernel: 'te' (Transformer Engine), 'flash' (flash-attn), 'varlen' (torch's own
    variable-length kernel), 'flex' (FlexAttention), 'sdpa' (runs everywhere), or 'auto': the first
    of these that can serve; it says why not those before it."""

    anchor_context_parallel: Literal["auto", "ulysses", "te"] = "auto"
    """Who communicates under --context-parallel-size: 'ulysses' (ours: any kernel, no padding) or
    'te' (Transformer Engine: documents are padded and split zigzag). 'auto' is ulysses when every
    --cp-comm-type is a2a, else te."""

    rope_parameters: str | None = None
    """Scaled rotary embedding in Hugging Face's form, as JSON, for instance
    '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}'. The base stays
    --rotary-base."""

    rope_angle_dtype: Literal["float32", "float64"] = "float32"
    """Precision of the rotation's angles: float32 as in Hugging Face, or float64 for studies."""

    dump_bad_batch: str | None = None
    """Folder for the batch whose loss or gradient is NaN or Inf: tokens, labels, positions and
    documents as .npz, names and text as .json. The message names samples and documents anyway."""


EXAMPLE = """\
example, Llama-2-7B extended to 64K on 8 GPUs (your launch script's other arguments stay):
  torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt \\
      --attention-pattern anchor --seq-length 65536 --max-position-embeddings 65536 \\
      --position-embedding-type rope --rotary-base 5000000 --context-parallel-size 8 ...
"""


def add_anchor_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser, and adapt the defaults that would not fit."""
    compat.add_argument_group(parser, AnchorArguments, title="megatron_anchor")
    compat.mend_help_texts(parser)
    parser.epilog = EXAMPLE
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.set_defaults(**adapted_defaults())
    return parser


def adapted_defaults() -> dict[str, Any]:
    """Give the defaults that differ from Megatron's; an explicit flag still wins."""
    defaults: dict[str, Any] = {
        # Ulysses serves every kernel without padding documents; Megatron's p2p serves one.
        "cp_comm_type": ["a2a"],
        # The rotation happens in our core attention; Megatron's fused one is never called.
        "apply_rope_fusion": False,
    }
    if not compat.have_transformer_engine():
        defaults["transformer_impl"] = "local"
    if not compat.have_fused_weight_gradient():
        defaults["gradient_accumulation_fusion"] = False
    return defaults


def anchor_arguments(args: Namespace) -> AnchorArguments:
    """Read our flags back from Megatron's namespace."""
    return AnchorArguments(**{f.name: getattr(args, f.name) for f in fields(AnchorArguments)})


def document_alignment(args: Namespace) -> int:
    """--document-alignment, else what the context parallelism needs."""
    if args.document_alignment is not None:
        return args.document_alignment
    return 2 * args.context_parallel_size if splits_documents(args) else 1


def context_parallel(args: Namespace) -> str:
    """Resolve --anchor-context-parallel to ``ulysses`` or ``te``."""
    if args.anchor_context_parallel != "auto":
        return args.anchor_context_parallel
    return ULYSSES if set(args.cp_comm_type) == {"a2a"} else TRANSFORMER_ENGINE


def splits_documents(args: Namespace) -> bool:
    """Say whether ranks hold zigzag pieces of every document, and not a piece of the sample."""
    return args.context_parallel_size > 1 and context_parallel(args) == TRANSFORMER_ENGINE


def interleaving(args: Namespace) -> Interleaving | None:
    """Settings of --interleave-chunks, None without it."""
    if not args.interleave_chunks:
        return None
    return Interleaving(
        max_chunks=args.interleave_max_chunks,
        min_chunk_length=args.interleave_min_chunk_length,
        max_chunk_length=args.interleave_max_chunk_length,
    )


def rope_scaling(args: Namespace) -> dict[str, Any]:
    """Translate the flags for scaled RoPE into Hugging Face's ``rope_parameters``.

    Args:
        args: Megatron's namespace; --rope-parameters wins nothing silently: it excludes Megatron's
            own --use-rope-scaling and --rotary-seq-len-interpolation-factor.

    Returns:
        Empty for plain RoPE.

    Raises:
        ValueError: for two kinds at once, or JSON that is not an object.
    """
    kinds: dict[str, dict[str, Any]] = {}
    if args.rope_parameters:
        kinds["--rope-parameters"] = _parse_rope_parameters(args.rope_parameters)
    if args.use_rope_scaling:
        # Megatron's apply_scaling (core/models/common/embeddings/rotary_pos_embedding.py) has
        # Llama 3.1's other constants built in.
        kinds["--use-rope-scaling"] = {
            "rope_type": "llama3",
            "factor": args.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if args.rotary_seq_len_interpolation_factor:
        factor = float(args.rotary_seq_len_interpolation_factor)
        kinds["--rotary-seq-len-interpolation-factor"] = {"rope_type": "linear", "factor": factor}
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} ask for two RoPE scalings; keep one of them")
    return next(iter(kinds.values()), {})


def _parse_rope_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--rope-parameters is not JSON: {text!r}: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError(
            f"--rope-parameters must be a JSON object such as "
            f'{{"rope_type": "linear", "factor": 2.0}}, got {text!r}'
        )
    return parameters
