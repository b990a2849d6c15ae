"""What the packing tests share: a slow, obvious packer, corpora on disk, and their strategies."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_anchor.indexed.manifest import DomainCount, KeyManifest
from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig
from megatron_anchor.packing.patterns import attention_patterns

ANCHOR, PAD, VOCAB_SIZE = 1, 0, 60000
TENSOR_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "router_mask", "cu_seqlens")
SCALAR_FIELDS = ("max_seqlen", "num_documents", "num_cut", "num_padding")


class Slot(NamedTuple):
    """One slot of a sample, as the slow packers lay it."""

    token: int | None
    label: int | None
    piece: int
    kind: str
    """anchor, tag, text or filling"""


def pack(
    documents: list[list[int]],
    *,
    anchor: int,
    sequence_length: int,
    packing: str = "concat",
    alignment: int = 1,
    tags: list[list[int]] | None = None,
) -> list[list[Slot]]:
    """Samples without the padding behind the last document slice."""
    heads, contents = [], []
    for document, tag in zip(documents, tags or [[]] * len(documents), strict=True):
        content = document[1:] if document[:1] == [anchor] else document
        if content:
            contents.append(content)
            heads.append([anchor, *tag])
    pack = {"concat": pack_concat, "best-fit": pack_best_fit}[packing]
    return pack(heads, contents, sequence_length=sequence_length, alignment=alignment)


def take_slice(
    head: list[int], content: list[int], start: int, room: int, *, begun: bool, piece: int
) -> list[Slot]:
    """The slots of a slice from token `start` on, as many as fit in the room."""
    kinds = ["anchor"] + ["tag"] * (len(head) - 1)
    slots = [Slot(token, None, piece, kind) for token, kind in zip(head, kinds, strict=True)]
    if not begun:
        slots[-1] = slots[-1]._replace(label=content[0])
    for place in range(start, min(len(content), start + room - len(head))):
        label = content[place + 1] if place + 1 < len(content) else None
        slots.append(Slot(content[place], label, piece, "text"))
    return slots


def fill(slots: list[Slot], alignment: int) -> list[Slot]:
    while len(slots) % alignment:
        slots.append(Slot(None, None, slots[-1].piece, "filling"))
    return slots


def pack_concat(
    heads: list[list[int]], contents: list[list[int]], *, sequence_length: int, alignment: int
) -> list[list[Slot]]:
    samples: list[list[Slot]] = [[]]
    piece = 0
    for head, content in zip(heads, contents, strict=True):
        start, begun = 0, False
        while not begun or start < len(content):
            room = sequence_length - len(samples[-1])
            if room < len(head):
                samples.append([])
                continue
            piece += 1
            slots = take_slice(head, content, start, room, begun=begun, piece=piece)
            start += len(slots) - len(head)
            begun = True
            samples[-1] += fill(slots, alignment)
    return [sample for sample in samples if sample]


def pack_best_fit(
    heads: list[list[int]], contents: list[list[int]], *, sequence_length: int, alignment: int
) -> list[list[Slot]]:
    """Best-fit decreasing; of samples with equal room the one filled last is taken."""
    samples, items = [], []
    for number, (head, content) in enumerate(zip(heads, contents, strict=True)):
        start = 0
        while len(head) + len(content) - start >= sequence_length:
            samples.append(
                take_slice(head, content, start, sequence_length, begun=start > 0, piece=1)
            )
            start += sequence_length - len(head)
        if start < len(content):
            rest = take_slice(head, content, start, sequence_length, begun=start > 0, piece=number)
            items.append((number, fill(rest, alignment)))
    bins: list[dict[str, Any]] = []
    for time, (number, item) in enumerate(sorted(items, key=lambda item: -len(item[1]))):
        enough = [b for b in bins if b["room"] >= len(item)]
        if not enough:
            bins.append({"room": sequence_length, "items": []})
            enough = bins[-1:]
        best = min(enough, key=lambda b: (b["room"], -b.get("time", 0)))
        best["room"] -= len(item)
        best["time"] = time
        best["items"].append((number, item))
    return samples + [
        [slot for _, item in sorted(b["items"], key=lambda item: item[0]) for slot in item]
        for b in bins
    ]


def expected_fields(
    sample: list[Slot],
    *,
    sequence_length: int,
    pad: int,
    pattern: str,
    anchor_position: int = 0,
    first_token_loss: bool = True,
) -> dict[str, Any]:
    """All fields of a sample as lists and numbers, straight from DESIGN's table of patterns."""
    if pattern == "full":
        sample = [slot for slot in sample if slot.kind != "filling"]
    num_padding = sequence_length - sum(slot.kind != "filling" for slot in sample)
    borders = [0]
    slots_of_documents: list[int] = []
    positions: list[int] = []
    labels: list[int | None] = []
    tokens_so_far = slots_so_far = slots_of_piece = 0
    for slot, (_, label, _, kind) in enumerate(sample):
        if kind == "anchor":
            slots_of_piece = 0
            slots_of_documents.append(slot)
            if slot:
                borders.append(slot)
                if pattern == "anchor-masked" and slot + 1 < len(sample):
                    borders.append(slot + 1)
        tokens_so_far += kind in ("tag", "text")
        positions.append(
            0
            if kind == "filling"
            else {
                "anchor": anchor_position if kind == "anchor" else tokens_so_far,
                "anchor-masked": anchor_position if kind == "anchor" else tokens_so_far,
                "intra-document": slots_so_far,
                "intra-document-reset": slots_of_piece,
                "full": slot,
            }[pattern]
        )
        slots_so_far += kind != "filling"
        slots_of_piece += 1
        predicts_first = kind in ("anchor", "tag") and label is not None
        labels.append(None if predicts_first and not first_token_loss else label)
    num_documents = len(slots_of_documents)
    copies = slots_of_documents[1:] if pattern in ("anchor", "anchor-masked") else []
    counted = [place not in copies and slot.kind != "filling" for place, slot in enumerate(sample)]
    slices = [
        [slot for slot in sample[begin:end] if slot.kind != "filling"]
        for begin, end in itertools.pairwise([*slots_of_documents, len(sample)])
    ]
    tail = sequence_length - len(sample)
    if tail:
        borders.append(len(sample))
    borders.append(sequence_length)
    if pattern == "full":
        borders = [0, sequence_length]
        positions += range(len(sample), sequence_length)
    else:
        positions += [0] * tail
    length = sequence_length if pattern == "anchor-masked" else -(-sequence_length // 2)
    length += 1
    return {
        "tokens": [pad if token is None else token for token, *_ in sample] + [pad] * tail,
        "labels": [label or 0 for label in labels] + [0] * tail,
        "loss_mask": [float(label is not None) for label in labels] + [0.0] * tail,
        "position_ids": positions,
        "router_mask": counted + [False] * tail,
        "cu_seqlens": borders + [sequence_length] * (length - len(borders)),
        "max_seqlen": max(b - a for a, b in itertools.pairwise(borders)),
        "num_documents": num_documents,
        "num_cut": len(slices) - sum(is_whole(part) for part in slices),
        "num_padding": num_padding,
    }


def is_whole(part: list[Slot]) -> bool:
    """Whether a slice holds its document's first token as a target, and its last one as text."""
    return part[-1].label is None and any(
        slot.label is not None for slot in part if slot.kind != "text"
    )


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of ours as lists and numbers."""
    return {name: sample[name].tolist() for name in (*TENSOR_FIELDS, *SCALAR_FIELDS)}


def targets(sample: dict[str, Any]) -> list[int]:
    """The labels that count."""
    return sample["labels"][sample["loss_mask"] == 1].tolist()


def write_corpus(
    prefix: Path | str, documents: list[list[list[int]]], dtype: type = np.int32
) -> str:
    """Write documents, each a list of sequences, with Megatron's own writer."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        tokens = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(s) for s in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def make_config(blend: Any, **settings: Any) -> PackedDatasetConfig:
    """A config with the defaults of these tests; `blend` is a prefix or Megatron's blend."""
    defaults: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 8,
        "tokenizer": SimpleNamespace(vocab_size=VOCAB_SIZE, tokenize=spell),
        "anchor_token_id": ANCHOR,
        "pad_token_id": PAD,
        "vocab_size": VOCAB_SIZE,
    }
    if "blend_per_split" not in settings:
        defaults |= {"blend": ([blend], None) if isinstance(blend, str) else blend}
        defaults |= {"split": "1,0,0"}
    return PackedDatasetConfig(**(defaults | settings))


def build(config: PackedDatasetConfig, num_samples: Any = None) -> list[Any]:
    """Train, valid and test datasets, by Megatron's builder; `num_samples` of each, or of train."""
    sizes = num_samples if isinstance(num_samples, list) else [num_samples, None, None]
    return BlendedMegatronDatasetBuilder(PackedDataset, sizes, lambda: True, config).build()


def build_train(prefix: str, num_samples: int | None = None, **settings: Any) -> PackedDataset:
    """The train dataset over all documents of one corpus."""
    return build(make_config(prefix, **settings), num_samples)[0]


ATTENTION_PATTERNS = tuple(pattern.name for pattern in attention_patterns())

DOMAINS = ["a", "bc", "unknown"]
"""Domains of the tests' corpora; the last one says nothing."""


def spell(text: str) -> list[int]:
    """A tokenizer whose tokens occur in no document, with a bos in front as some have."""
    return [ANCHOR, *(50000 + ord(letter) for letter in text)]


def write_domains(prefix: str, ids: list[int]) -> None:
    """Say which of DOMAINS each document is of, as tools/preprocess_data.py does."""
    np.save(f"{prefix}.domains.npy", np.array(ids, dtype=np.int32))
    names = [DomainCount(name, 0, 0) for name in DOMAINS]
    KeyManifest(
        key="text", level="document", documents=len(ids), sequences=0, tokens=0, dtype="int32",
        vocab_size=VOCAB_SIZE, eod_id=None, bos_id=None, tokenizer={}, domains=names, rows_read=0,
        rejected={}, empty_documents=0, blank_lines=0, text_bytes=0, sources=[],
    ).write(Path(f"{prefix}.manifest.json"))  # fmt: skip


def flatten(documents: list[list[list[int]]]) -> list[list[int]]:
    """Documents as lists of tokens."""
    return [[token for sequence in document for token in sequence] for document in documents]


@st.composite
def corpora(draw: st.DrawFn, *, unique: bool = False) -> tuple[int, list[list[list[int]]]]:
    """(sequence length, documents): odd lengths around the sample's, with some usable token.

    Documents may be empty, begin with the anchor, hold literal anchors and pads, and have several
    sequences, empty ones among them. With `unique` no token but a leading anchor occurs twice.
    """
    sequence_length = draw(st.integers(2, 12))
    near = [sequence_length + d for d in (-2, -1, 0, 1)] + [2 * sequence_length - 1]
    lengths = st.one_of(st.sampled_from([0, 1, *near]), st.integers(0, 3 * sequence_length + 2))
    counts = draw(st.lists(lengths, min_size=1, max_size=12))
    fresh = iter(range(10, VOCAB_SIZE))
    documents = []
    for count in counts:
        tokens = [next(fresh) for _ in range(count)]
        if tokens and not unique:
            for place in draw(st.lists(st.integers(0, count - 1), max_size=3)):
                tokens[place] = draw(st.sampled_from([ANCHOR, PAD, 2]))
        if draw(st.integers(0, 3)) == 0:
            tokens.insert(0, ANCHOR)
        cut = draw(st.integers(0, len(tokens)))
        documents.append(
            draw(st.sampled_from([[tokens], [tokens[:cut], tokens[cut:]], [[], tokens]]))
        )
    if not any(tokens not in ([], [ANCHOR]) for tokens in flatten(documents)):
        documents.append([[next(fresh)]])
    return sequence_length, documents


TAG_OF_DOMAIN = [spell(f"{name}:")[1:] if name != "unknown" else [] for name in DOMAINS]


@st.composite
def packings(draw: st.DrawFn, *, unique: bool = False) -> dict[str, Any]:
    """A corpus and all settings that say which token stands where."""
    sequence_length, documents = draw(corpora(unique=unique))
    alignment = draw(st.sampled_from([1, 1, 2, 3, 4]))
    tagged = draw(st.booleans())
    if tagged:
        sequence_length = max(sequence_length, 5)
    domains = [draw(st.sampled_from(range(len(DOMAINS)))) for _ in documents] if tagged else None
    control = "anchor-masked"  # its anchors are segments of one slot
    patterns = [p for p in ATTENTION_PATTERNS if alignment == 1 or p != control]
    pattern = draw(st.sampled_from(patterns))
    return {
        "documents": documents,
        "domains": domains,
        "settings": {
            "sequence_length": sequence_length * alignment,
            "packing": draw(st.sampled_from(["concat", "best-fit"])),
            "document_alignment": alignment,
            "attention_pattern": pattern,
            "anchor_position": draw(st.sampled_from([0, 0, 3]))
            if pattern.startswith("anchor")
            else 0,
            "anchor_first_token_loss": draw(st.booleans()),
            "domain_tags": tagged,
            "domain_tag_format": "{domain}:",
            "random_seed": draw(st.integers(0, 9)),
        },
    }


def build_case(
    case: dict[str, Any], folder: str, num_samples: int | None = None, **changed: Any
) -> PackedDataset:
    """The train dataset of a case of `packings`."""
    prefix = write_corpus(f"{folder}/c", case["documents"])
    if case["domains"] is not None:
        write_domains(prefix, case["domains"])
    return build_train(prefix, num_samples, **(case["settings"] | changed))


def tags_of(case: dict[str, Any]) -> list[list[int]]:
    """The tokens of every document's tag."""
    if case["domains"] is None:
        return [[]] * len(case["documents"])
    return [TAG_OF_DOMAIN[domain] for domain in case["domains"]]


def slow_samples(case: dict[str, Any], *, epoch: int = 0) -> list[list[Slot]]:
    """What the dataset must serve in an epoch, in order: the slow packer between two shuffles."""
    options, documents = case["settings"], flatten(case["documents"])
    random_state = np.random.RandomState(options["random_seed"])  # as Megatron for one epoch
    if epoch:
        seeds = np.random.SeedSequence([options["random_seed"], epoch])
        random_state = np.random.RandomState(np.random.MT19937(seeds))
    order = np.arange(len(documents))
    random_state.shuffle(order)
    tags = tags_of(case)
    samples = pack(
        [documents[n] for n in order],
        anchor=ANCHOR,
        sequence_length=options["sequence_length"],
        packing=options["packing"],
        alignment=options["document_alignment"],
        tags=[tags[n] for n in order],
    )
    numbers = np.arange(len(samples))
    random_state.shuffle(numbers)
    return [samples[n] for n in numbers]
