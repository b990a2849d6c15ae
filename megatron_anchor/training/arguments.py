"""Our command-line flags: one dataclass, from which Megatron's parser builds the flags.

Annotations stay evaluated in this module: Megatron's factory reads them as types.
"""

import json
import math
from argparse import (
    Action,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn

from megatron_anchor import compat
from megatron_anchor.attention.layer_window import layer_windows
from megatron_anchor.context_parallel.split import ZIGZAG
from megatron_anchor.errors import UserError
from megatron_anchor.flags import add_flags, tell_default
from megatron_anchor.packing.patterns import patterns_help
from megatron_anchor.packing.settings import PackingSettings
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.training.context_parallel import resolve as resolve_context_parallel
from megatron_anchor.training.latent_rules import yarn_of_flags
from megatron_anchor.windows import LayerWindows

HAVE_A_FLAG = {
    "rope_theta": ("rotary_base", 10000.0),
    "partial_rotary_factor": ("rotary_percent", 1.0),
}
"""Keys of Hugging Face's ``rope_parameters`` to Megatron's argument for them, and its default."""

ROPE_KEYS = frozenset(
    (
        *("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
        *HAVE_A_FLAG,
    )
)
"""All keys that transformers' functions for scaled RoPE read."""

ANCHOR_TOKEN_FLAGS = ["--anchor-token", "--anchor-token-id"]


@dataclass(kw_only=True)
class AnchorArguments(PackingSettings):
    """Packed documents with a shared anchor (megatron_anchor)."""

    anchor_token: str | None = field(default=None, metadata={"flags": ANCHOR_TOKEN_FLAGS})
    """Token that stands at the head of every document: 'bos' or 'eos' of the tokenizer, or a token
    id. Default: its bos, else its eos."""

    document_list: list[str] | None = None
    """Documents of the training epoch, with repetitions, as tools/upsample_long_documents.py writes
    them: LIST.npy for a single corpus, CORPUS_PREFIX=LIST.npy for each of several."""

    document_length_schedule: str | None = None
    """Bound the length of documents at first, and let it grow with the samples consumed:
    linear:512:65536:100000 grows from 512 to 65536 slots over 100000 samples,
    steps:0=4096,20000=65536 steps up. Samples stay the same; evaluation has no bound."""

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

    anchor_in_window: bool = False
    """Keep the anchor visible to all tokens of a document where --window-size would leave it
    behind. By default it falls out of the window, as it does at inference."""

    attention_precision: Literal["model", "fp32"] = "model"
    """Precision of the attention core: the model's, or float32 from the rotation to the output."""

    anchor_attention_backend: str = "auto"
    """Attention kernel: 'te' (Transformer Engine), 'flash' (flash-attn), 'varlen' (torch's own
    variable-length kernel), 'flex' (FlexAttention), 'sdpa' (runs everywhere), or 'auto': the first
    of these that can serve; it says why not those before it."""

    anchor_context_parallel: Literal["auto", "ulysses", "te"] = "auto"
    """Who communicates under --cp-comm-type a2a: 'ulysses' (ours: any kernel, no padding) or 'te'
    (Transformer Engine: documents are padded and split zigzag). 'auto' is ours for auto, a2a,
    gather and a2a+gather, and Transformer Engine for its other kinds."""

    kv_gather_memory_mib: int | None = None
    """MiB that gathered keys and values may take beside a layer's own (--cp-comm-type gather and
    a2a+gather): fewer heads are gathered at once. Default: 1024, or what one head needs."""

    pad_documents_to: int | None = None
    """Documents per micro-batch for which cumulative lengths have room, so that their shapes do not
    change; more are an error. Default: as many as there are."""

    rope_parameters: str | None = None
    """Scaled rotary embedding in Hugging Face's form, as JSON, for instance
    '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}'. The base is
    --rotary-base, or rope_theta in here; the rotated share is --rotary-percent, or
    partial_rotary_factor."""

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
    group = parser.add_argument_group("megatron_anchor", AnchorArguments.__doc__)
    add_flags(group, AnchorArguments)
    _action(parser, "attention_pattern").help = patterns_help()
    for action in group._group_actions:
        tell_default(action)
    compat.mend_help_texts(parser)
    _end_without_usage(parser)
    parser.epilog = EXAMPLE
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.set_defaults(**adapted_defaults())
    return parser


def adapted_defaults() -> dict[str, Any]:
    """Give the defaults that differ from Megatron's; an explicit flag still wins."""
    defaults: dict[str, Any] = {
        # Ours serve every kernel without padding documents; Megatron's p2p serves one.
        "cp_comm_type": ["auto"],
        # The rotation happens in our core attention; Megatron's fused one is never called.
        "apply_rope_fusion": False,
        # What Megatron's own pretrain_gpt.py takes where the command line names none.
        "tokenizer_type": "GPT2BPETokenizer",
        # What Megatron took until it lost its default, and now divides by.
        "eval_interval": 1000,
    }
    if not compat.have_transformer_engine():
        defaults["transformer_impl"] = "local"
    if not compat.have_fused_weight_gradient():
        defaults["gradient_accumulation_fusion"] = False
    return defaults


def _end_without_usage(parser: ArgumentParser) -> None:
    """Let a mistake on the command line end with its reason and not with all flags of Megatron.

    The parser then raises ValueError. Megatron opens the file of --yaml-cfg while it parses, so
    this flag has to be refused in the same place.
    """

    def error(message: str) -> NoReturn:
        raise UserError(f"{message}\n(--help lists all flags)")

    def refuse(_: str) -> NoReturn:
        raise ArgumentTypeError("pass the arguments on the command line")

    parser.error = error  # type: ignore[method-assign]
    _action(parser, "yaml_cfg").type = refuse


def _action(parser: ArgumentParser, name: str) -> Action:
    return next(action for action in parser._actions if action.dest == name)


def anchor_arguments(args: Namespace) -> AnchorArguments:
    """Read our flags back from Megatron's namespace."""
    return AnchorArguments(**{f.name: getattr(args, f.name) for f in fields(AnchorArguments)})


def document_alignment(args: Namespace) -> int:
    """--document-alignment, else what the context parallelism needs."""
    if args.document_alignment is not None:
        return args.document_alignment
    split = context_parallel(args).split
    return 2 * split.cp_size if split.kind == ZIGZAG else 1


def model_windows(args: Namespace) -> LayerWindows:
    """The windows of all layers."""
    return layer_windows(args, layers=args.num_layers, keeps_anchor=args.anchor_in_window)


def packing_settings(args: Namespace) -> PackingSettings:
    """How samples are made, with the alignment that the context parallelism needs."""
    given = {f.name: getattr(args, f.name) for f in fields(PackingSettings)}
    return PackingSettings(**given | {"document_alignment": document_alignment(args)})


def rope_scaling(args: Namespace) -> dict[str, Any]:
    """Translate the flags for scaled RoPE into Hugging Face's ``rope_parameters``.

    Args:
        args: Megatron's namespace; --rope-parameters wins nothing silently: it excludes Megatron's
            own --use-rope-scaling, --rotary-seq-len-interpolation-factor and, for multi-latent
            attention, --rotary-scaling-factor.

    Returns:
        Empty for plain RoPE; never with the keys that have a flag, for which see `rotary_base` and
        `rotary_percent`.

    Raises:
        UserError: for two kinds at once, or JSON that is not an object.
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
    if yarn := yarn_of_flags(args):
        kinds["--rotary-scaling-factor"] = yarn
    if len(kinds) > 1:
        raise UserError(f"{' and '.join(kinds)} ask for two RoPE scalings; keep one of them")
    scaling = next(iter(kinds.values()), {})
    return {name: value for name, value in scaling.items() if name not in HAVE_A_FLAG}


def rotary_base(args: Namespace) -> float:
    """The base of the rotation: --rotary-base, or ``rope_theta`` of --rope-parameters.

    Raises:
        UserError: both are given and differ, or rope_theta is no number above 0.
    """
    return _of_flag_or_rope_parameters(args, "rope_theta")


def rotary_percent(args: Namespace) -> float:
    """The rotated share of a head: --rotary-percent, or ``partial_rotary_factor``.

    Raises:
        UserError: both are given and differ, or partial_rotary_factor is no number above 0.
    """
    return _of_flag_or_rope_parameters(args, "partial_rotary_factor")


def settle(args: Namespace) -> None:
    """Leave one place for what two flags may say, before Megatron reads and records them.

    Raises:
        UserError: the two contradict each other.
    """
    if args.rope_parameters:
        base, scaling = rotary_base(args), rope_scaling(args)
        args.rotary_base = int(base) if base.is_integer() else base
        args.rotary_percent = rotary_percent(args)
        plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
        args.rope_parameters = None if plain else json.dumps(scaling)
    if args.seq_length is None and args.encoder_seq_length is not None:
        args.seq_length, args.encoder_seq_length = args.encoder_seq_length, None
    resolve_context_parallel(args)


def _of_flag_or_rope_parameters(args: Namespace, key: str) -> float:
    name, default = HAVE_A_FLAG[key]
    flag, given = f"--{name.replace('_', '-')}", float(getattr(args, name))
    inside = _parse_rope_parameters(args.rope_parameters).get(key) if args.rope_parameters else None
    if inside is None:
        return given
    if type(inside) not in (int, float) or not 0 < inside < math.inf:
        raise UserError(f"--rope-parameters: {key} is {inside!r}, expected a number above 0")
    if given != inside and (given != default or compat.was_typed(flag)):
        raise UserError(
            f"--rope-parameters holds {key} {inside:g}, and {flag} is {given:g}; leave one of "
            "them out"
        )
    return float(inside)


def _parse_rope_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--rope-parameters is not JSON: {text!r}: {error}") from error
    if not isinstance(parameters, dict):
        raise UserError(
            f"--rope-parameters must be a JSON object such as "
            f'{{"rope_type": "linear", "factor": 2.0}}, got {text!r}'
        )
    if unknown := sorted(parameters.keys() - ROPE_KEYS):
        raise UserError(
            f"--rope-parameters: nothing reads {', '.join(unknown)}; expected keys are "
            f"{', '.join(sorted(ROPE_KEYS))}"
        )
    return parameters
