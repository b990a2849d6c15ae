"""The worked example of the design, and lay_out against the slow packer."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_anchor.packing.index import concatenate, concatenated_slices, count_slots
from megatron_anchor.packing.layout import Layout, lay_out
from megatron_anchor.packing.patterns import attention_pattern, attention_patterns
from tests.unit.packing_oracle import (
    ANCHOR,
    ATTENTION_PATTERNS,
    SCALAR_FIELDS,
    TENSOR_FIELDS,
    corpora,
    expected_fields,
    flatten,
    pack,
    plain,
)

EXAMPLE = [[11, 12, 13, 2], [21, 22, 2], [31, 32, 33, 34, 35, 2], [41, 42, 2], [51, 52, 53]]
"""The design's three documents (2 ends a document), and two more that fill three samples."""

COMMON = {
    "tokens": [
        [1, 11, 12, 13, 2, 1, 21, 22, 2, 1, 31, 32],
        [1, 33, 34, 35, 2, 1, 41, 42, 2, 1, 51, 52],
        [1, 53, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    "labels": [
        [11, 12, 13, 2, 0, 21, 22, 2, 0, 31, 32, 33],
        [0, 34, 35, 2, 0, 41, 42, 2, 0, 51, 52, 53],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    "loss_mask": [
        [1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1],
        [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    "num_documents": [3, 3, 1],
    "num_cut": [1, 2, 1],
    "num_padding": [0, 0, 10],
}
ONE_ANCHOR = {
    "router_mask": [
        [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1],
        [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1],
        [1, 1, *[0] * 10],
    ]
}
EVERY_ANCHOR = {"router_mask": [[1] * 12, [1] * 12, [1, 1, *[0] * 10]]}
MASKED = {
    "cu_seqlens": [
        [0, 5, 9, 12, 12, 12, 12],
        [0, 5, 9, 12, 12, 12, 12],
        [0, 2, 12, 12, 12, 12, 12],
    ],
    "max_seqlen": [5, 5, 10],
}
BY_PATTERN = {
    "anchor": MASKED
    | ONE_ANCHOR
    | {
        "position_ids": [
            [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 8, 9],
            [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 8, 9],
            [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    },
    "intra-document": MASKED
    | EVERY_ANCHOR
    | {"position_ids": [[*range(12)], [*range(12)], [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]},
    "intra-document-reset": MASKED
    | EVERY_ANCHOR
    | {
        "position_ids": [
            [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
            [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
            [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    },
    "anchor-masked": ONE_ANCHOR
    | {
        "cu_seqlens": [
            [0, 5, 6, 9, 10, *[12] * 8],
            [0, 5, 6, 9, 10, *[12] * 8],
            [0, 2, *[12] * 11],
        ],
        "max_seqlen": [5, 5, 10],
        "position_ids": [
            [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 8, 9],
            [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 8, 9],
            [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
    },
    "full": EVERY_ANCHOR
    | {
        "cu_seqlens": [[0, 12, 12, 12, 12, 12, 12]] * 3,
        "max_seqlen": [12, 12, 12],
        "position_ids": [[*range(12)]] * 3,
    },
}


def lay_out_all(
    documents: list[list[int]], *, sequence_length: int, pattern: str, pad: int = 0
) -> list[dict]:
    """Index and layout over plain lists, without any file: all samples in stream order."""
    text = np.array([token for document in documents for token in document], dtype=np.int32)
    own = np.array([document[:1] == [ANCHOR] for document in documents], dtype=np.int64)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    content = (lengths - own).astype(np.int32)
    begin = np.cumsum(lengths) - lengths + own
    order = np.arange(len(documents), dtype=np.int32)
    index = concatenate(
        order, content, sequence_length=sequence_length, slots=count_slots(order, content)
    ).sample_index
    samples = []
    for (first, first_offset), (last, last_offset) in itertools.pairwise(index):
        which = order[first : last + (last_offset > 0)].astype(np.int64)
        pieces = concatenated_slices(
            which,
            begin[which],
            content[which].astype(np.int64),
            first_offset=first_offset,
            last_offset=last_offset,
        )
        samples.append(
            lay_out(
                text,
                pieces,
                Layout(
                    sequence_length=sequence_length,
                    pattern=attention_pattern(pattern),
                    anchor_token_id=ANCHOR,
                    pad_token_id=pad,
                ),
            )
        )
    return samples


@pytest.mark.parametrize("pattern", ATTENTION_PATTERNS)
def test_worked_example_of_the_design(pattern: str) -> None:
    samples = lay_out_all(EXAMPLE, sequence_length=12, pattern=pattern)
    expected = COMMON | BY_PATTERN[pattern]
    assert len(samples) == 3
    assert set(samples[0]) == set(expected) == {*TENSOR_FIELDS, *SCALAR_FIELDS}
    for name, values in expected.items():
        assert [sample[name].tolist() for sample in samples] == values, name


@settings(deadline=None, max_examples=100)
@given(corpora())
def test_every_pattern_equals_the_slow_packer(corpus: tuple[int, list]) -> None:
    sequence_length, documents = corpus
    samples = pack(flatten(documents), anchor=ANCHOR, sequence_length=sequence_length)
    for pattern in ATTENTION_PATTERNS:
        ours = lay_out_all(flatten(documents), sequence_length=sequence_length, pattern=pattern)
        theirs = [
            expected_fields(sample, sequence_length=sequence_length, pad=0, pattern=pattern)
            for sample in samples
        ]
        assert [plain(sample) for sample in ours] == theirs


def test_fields_have_the_promised_types_and_shapes() -> None:
    sample = lay_out_all(EXAMPLE, sequence_length=11, pattern="anchor")[0]
    forms = {name: (array.dtype.name, array.shape) for name, array in sample.items()}
    assert forms == {
        "tokens": ("int64", (11,)),
        "labels": ("int64", (11,)),
        "loss_mask": ("float32", (11,)),
        "position_ids": ("int64", (11,)),
        "router_mask": ("bool", (11,)),
        "cu_seqlens": ("int32", (7,)),
        "max_seqlen": ("int32", ()),
        "num_documents": ("int32", ()),
        "num_cut": ("int32", ()),
        "num_padding": ("int32", ()),
    }


@pytest.mark.parametrize("sequence_length", [2, 3, 8, 9])
def test_cu_seqlens_holds_the_most_segments_that_fit(sequence_length: int) -> None:
    one_token = [[10 + number] for number in range(sequence_length)]
    most = 0
    for documents in (one_token, [[7, 8], *one_token], one_token[: sequence_length // 2]):
        sample = lay_out_all(documents, sequence_length=sequence_length, pattern="anchor")[0]
        most = max(most, len(set(sample["cu_seqlens"].tolist())) - 1)
    assert most == attention_pattern("anchor").max_segments(sequence_length)


def test_tokens_do_not_depend_on_the_pattern() -> None:
    samples = [lay_out_all(EXAMPLE, sequence_length=7, pattern=name) for name in ATTENTION_PATTERNS]
    for others in samples[1:]:
        for sample, other in zip(samples[0], others, strict=True):
            for name in ("tokens", "labels", "loss_mask"):
                assert np.array_equal(sample[name], other[name])


def test_padding_token_may_be_any_token() -> None:
    documents = [[5, 9, 9, 5, 9]]  # 9 is the end of documents, ordinary text and padding
    sample = lay_out_all(documents, sequence_length=8, pattern="anchor", pad=9)[0]
    assert sample["tokens"].tolist() == [1, 5, 9, 9, 5, 9, 9, 9]
    assert sample["labels"].tolist() == [5, 9, 9, 5, 9, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_slices_beyond_the_text_are_never_read() -> None:
    with pytest.raises(AssertionError):
        lay_out(
            np.arange(4, dtype=np.int32),
            concatenated_slices(
                np.array([0]), np.array([2]), np.array([3]), first_offset=0, last_offset=0
            ),
            Layout(
                sequence_length=8,
                pattern=attention_pattern("anchor"),
                anchor_token_id=ANCHOR,
                pad_token_id=0,
            ),
        )


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("anchr", "did you mean 'anchor'"),
        ("intra-doc-reset", "did you mean 'intra-document-reset'"),
    ],
)
def test_unknown_pattern_names_the_nearest_one(pattern: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{pattern}.*{hint}.*--attention-pattern"):
        attention_pattern(pattern)


def test_known_patterns_pass_and_a_strange_one_lists_them() -> None:
    assert [attention_pattern(p.name) for p in attention_patterns()] == [*attention_patterns()]
    with pytest.raises(ValueError, match="'xyz': set --attention-pattern to one of anchor, intra"):
        attention_pattern("xyz")


def test_index_layout_and_statistics_need_neither_torch_nor_megatron() -> None:
    names = "index layout epochs documents cache statistics patterns vocabulary"
    imports = "; ".join(f"import megatron_anchor.packing.{name}" for name in names.split())
    check = "import sys; assert not {'torch', 'megatron'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True)
