"""Best-fit packing: no document that fits in a sample is cut (arXiv 2404.10830).

Documents longer than a sample are cut into full samples first; their rests and all other documents
are packed by best-fit decreasing: from the largest to the smallest, each goes to the sample with
the least room that is enough, else begins a sample. This is done over windows of the reading order,
so that memory stays flat; the documents of a sample keep their reading order.

Samples are stored as (position, chunk): the documents from `position` on in the new document index,
chunk 0 = whole documents and rests of long ones; chunk k >= 1 = the k-th full sample of the one
document there. A document's chunks and rest follow from its length, so nothing else is stored.

Cost: about 40 ns a document. The samples with a given room are found through a bitmap of rooms.

Legend: D documents of the corpus, O documents in reading order (all epochs), I items of a window,
N samples, P slices.
"""

import numpy as np

from megatron_anchor.packing.compiled import compiled
from megatron_anchor.packing.index import ANCHOR_ALONE, Packed, Slices, make_slices

WINDOW = 1 << 18
"""documents packed together; each window may leave a sample partly filled"""

_BITS = np.uint64(64)
_ONE = np.uint64(1)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACES = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _PLACES[((int(_DE_BRUIJN) << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


@compiled
def _lowest_bit(word: np.uint64) -> int:
    """Place of the lowest bit that is set: a de Bruijn sequence hashes the 64 single bits."""
    lowest = word & (~word + _ONE)
    return _PLACES[(lowest * _DE_BRUIJN) >> np.uint64(58)]


@compiled
def _set(words: np.ndarray, place: int) -> None:
    words[place >> 6] |= _ONE << np.uint64(place & 63)


@compiled
def _clear(words: np.ndarray, place: int) -> None:
    words[place >> 6] &= ~(_ONE << np.uint64(place & 63))


@compiled
def _next_set(words: np.ndarray, place: int) -> int:
    """First place from `place` on whose bit is set; -1 = none."""
    number = place >> 6
    if number >= len(words):
        return -1
    word = words[number] >> np.uint64(place & 63)
    if word:
        return place + _lowest_bit(word)
    for later in range(number + 1, len(words)):
        if words[later]:
            return (later << 6) + _lowest_bit(words[later])
    return -1


@compiled
def _fit_window(
    size_I: np.ndarray,
    most: int,
    sample_I: np.ndarray,
    order_I: np.ndarray,
    first_of_size: np.ndarray,
    next_sample: np.ndarray,
    newest_with_room: np.ndarray,
    rooms: np.ndarray,
    summary: np.ndarray,
) -> int:
    """Give every item the number of a sample in `sample_I`; return how many samples there are.

    Sizes are 1 to `most`, a whole sample. The other arrays are room to work in.
    """
    first_of_size[:] = 0
    for i in range(len(size_I)):
        first_of_size[most - size_I[i] + 1] += 1
    for size in range(most):
        first_of_size[size + 1] += first_of_size[size]
    for i in range(len(size_I)):  # stable: of equal documents the one read first comes first
        place = first_of_size[most - size_I[i]]
        order_I[place] = i
        first_of_size[most - size_I[i]] = place + 1
    newest_with_room[:] = -1
    rooms[:] = 0
    summary[:] = 0
    samples = 0
    size = most
    for place in range(len(size_I)):
        item = order_I[place]
        while place >= first_of_size[most - size]:  # now the end of each size
            size -= 1
        # The room that fits best: in the word of `size` itself, or in the next word with a bit.
        room = -1
        word = rooms[size >> 6] >> np.uint64(size & 63)
        if word:
            room = size + _lowest_bit(word)
        else:
            number = _next_set(summary, (size >> 6) + 1)
            if number >= 0:
                room = (number << 6) + _lowest_bit(rooms[number])
        if room < 0:
            sample = samples
            samples += 1
            room = most
        else:
            sample = newest_with_room[room]
            newest_with_room[room] = next_sample[sample]
            if newest_with_room[room] < 0:
                _clear(rooms, room)
                if rooms[room >> 6] == 0:
                    _clear(summary, room >> 6)
        sample_I[item] = sample
        room -= size
        if room > 0:
            next_sample[sample] = newest_with_room[room]
            newest_with_room[room] = sample
            _set(rooms, room)
            _set(summary, room >> 6)
    return samples


@compiled
def _fit(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    prefix_slots_D: np.ndarray,
    sequence_length: int,
    alignment: int,
    window: int,
    document_index: np.ndarray,
    sample_index: np.ndarray,
) -> tuple[int, int, int, int, int, int]:
    """Fill both arrays.

    Returns:
        Samples, slices, cut documents, occupied slots, full samples plus items over half a sample,
        and full samples plus what the items' slots fill at least.
    """
    same_prefix = len(prefix_slots_D) == 1
    prefix = int(prefix_slots_D[0])
    most = sequence_length // alignment
    window = min(window, len(document_index_O))
    content_I = np.empty(window, dtype=np.int32)
    document_I = np.empty(window, dtype=np.int32)
    size_I = np.empty(window, dtype=np.int32)
    sample_I = np.empty(window, dtype=np.int32)
    order_I = np.empty(window, dtype=np.int32)
    next_sample = np.empty(window, dtype=np.int32)
    begin = np.empty(window + 1, dtype=np.int64)
    first_of_size = np.empty(most + 2, dtype=np.int32)
    newest_with_room = np.empty(most + 1, dtype=np.int32)
    rooms = np.empty((most >> 6) + 1, dtype=np.uint64)
    summary = np.empty((len(rooms) >> 6) + 1, dtype=np.uint64)
    samples = written = cut_documents = occupied = chunks = large = sizes = 0
    for first in range(0, len(document_index_O), window):
        read = min(window, len(document_index_O) - first)
        for i in range(read):  # nothing but loads, which do not wait for each other
            content_I[i] = content_lengths_D[document_index_O[first + i]]
        items = 0
        for i in range(read):
            rest = int(content_I[i])
            if rest <= 0:
                continue
            document = document_index_O[first + i]
            if not same_prefix:
                prefix = int(prefix_slots_D[document])
            occupied += prefix + rest
            if rest >= sequence_length - prefix:  # a division is slow, and seldom needed
                full = rest // (sequence_length - prefix)
                rest -= full * (sequence_length - prefix)
                for chunk in range(full):
                    document_index[written + chunk] = document
                    sample_index[samples + chunk, 0] = written + chunk
                    sample_index[samples + chunk, 1] = chunk + 1
                written += full
                samples += full
                chunks += full
                cut_documents += full > 1 or rest > 0
                occupied += prefix * (full - (rest == 0))
                if rest == 0:
                    continue
            size = prefix + rest
            if alignment > 1:
                size = (size + alignment - 1) // alignment
            document_I[items] = document
            size_I[items] = size
            items += 1
            sizes += size
            large += 2 * size > most
        fitted = _fit_window(
            size_I[:items],
            most,
            sample_I,
            order_I,
            first_of_size,
            next_sample,
            newest_with_room,
            rooms,
            summary,
        )
        begin[: fitted + 1] = 0
        for i in range(items):
            begin[sample_I[i] + 1] += 1
        begin[0] = written
        for sample in range(fitted):
            sample_index[samples + sample, 0] = begin[sample]
            sample_index[samples + sample, 1] = 0
            begin[sample + 1] += begin[sample]
        for i in range(items):
            document_index[begin[sample_I[i]]] = document_I[i]
            begin[sample_I[i]] += 1
        written += items
        samples += fitted
    sample_index[samples, 0] = written
    sample_index[samples, 1] = 0
    filled = chunks + (sizes + most - 1) // most
    return samples, written, cut_documents, occupied, chunks + large, filled


def fit(
    document_index_O: np.ndarray,
    content_lengths_D: np.ndarray,
    *,
    sequence_length: int,
    slots: int,
    prefix_slots_D: np.ndarray = ANCHOR_ALONE,
    alignment: int = 1,
    window: int = WINDOW,
) -> Packed:
    """Pack documents into samples without cutting any that fits in one.

    Args:
        document_index_O: int32 documents in reading order.
        content_lengths_D: int32 tokens of every document behind its anchor; 0 = takes no slots.
        sequence_length: S, slots of a sample, a multiple of `alignment`, above any prefix.
        slots: `count_slots` of these documents, or more.
        prefix_slots_D: int32 slots of every document's prefix, or one number for all of them.
        alignment: each document takes a multiple of it.
        window: documents packed together.

    Returns:
        Samples; the rows of `sample_index` are (position, chunk). `fewest_samples` counts the full
        samples, and for the rest the slots or the items over half a sample, whichever needs more.
    """
    # Pages of these that are not written to take no memory.
    most = len(document_index_O) + slots // (sequence_length - int(prefix_slots_D.max())) + 1
    document_index = np.empty(most, dtype=np.int32)
    sample_index = np.empty((most + 1, 2), dtype=np.int64)
    samples, slices, cut_documents, occupied, *bounds = _fit(
        document_index_O,
        content_lengths_D,
        prefix_slots_D,
        sequence_length,
        alignment,
        window,
        document_index,
        sample_index,
    )
    return Packed(
        document_index=document_index[:slices],
        sample_index=sample_index[: samples + 1],
        slices=slices,
        cut_documents=cut_documents,
        occupied=occupied,
        fewest_samples=max(bounds),
    )


def fitted_slices(
    document_P: np.ndarray,
    begin_P: np.ndarray,
    content_P: np.ndarray,
    *,
    chunk: int,
    sequence_length: int,
    tag_P: np.ndarray | None = None,
    prefix_P: np.ndarray | None = None,
    alignment: int = 1,
) -> Slices:
    """The slices of one sample of `fit` that holds the given documents.

    Args:
        chunk: 0 = whole documents and rests of long ones, k = the k-th full sample of the one.

    The other arguments are those of `concatenated_slices`.
    """
    most_P = sequence_length - (1 if prefix_P is None else prefix_P)
    if chunk:
        skipped_P = np.full_like(content_P, (chunk - 1) * most_P)
        length_P = np.full_like(content_P, most_P)
    else:
        skipped_P = content_P // most_P * most_P
        length_P = content_P - skipped_P
    return make_slices(
        document_P,
        begin_P,
        content_P,
        skipped_P=skipped_P,
        length_P=length_P,
        begun_P=skipped_P > 0,
        tag_P=tag_P,
        prefix_P=prefix_P,
        alignment=alignment,
    )
