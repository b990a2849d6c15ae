"""Tables of rows: parquet files, datasets saved by Hugging Face `datasets`, streams of its hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_anchor.corpus.sources import Source
from megatron_anchor.corpus.table_parts import require_text, rows_at_once
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import hub

if TYPE_CHECKING:
    from megatron_anchor.corpus.readers import ReadOptions

DAMAGE = (pa.ArrowException, OSError, EOFError)


@dataclass
class Table:
    """Rows that can be read from any place: `batches(first, stop, step)` gives Arrow tables."""

    rows: int
    bytes_a_row: float
    batches: Callable[[int, int, int], Iterator[pa.Table]]


def open_table(source: Source, options: ReadOptions) -> Table:
    """Open a parquet file or a saved dataset; `UserError` where a needed column is missing."""
    return (_parquet if source.format == "parquet" else _saved)(source, options)


def count_rows(source: Source, options: ReadOptions) -> int | None:
    """Rows of a table, None for sources that are no tables."""
    if source.format not in ("parquet", "dataset"):
        return None
    return open_table(source, options).rows


def _parquet(source: Source, options: ReadOptions) -> Table:
    try:
        file = pq.ParquetFile(source.path)
    except DAMAGE as error:
        raise UserError(
            f"{source.path} is no readable parquet file: {error}; fetch it "
            "again, or give --input-format where it is of another kind"
        ) from error
    columns = _needed(source, options, file.schema_arrow.names)
    meta = file.metadata
    size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    starts = [0]
    for i in range(meta.num_row_groups):
        starts.append(starts[-1] + meta.row_group(i).num_rows)

    def batches(first: int, stop: int, step: int) -> Iterator[pa.Table]:
        step = rows_at_once(file, source.path, columns, wanted=step)
        for group in range(len(starts) - 1):
            if starts[group + 1] <= first or starts[group] >= stop:
                continue
            require_text(file, group, columns)
            at = starts[group]
            for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=columns):
                begin, end = max(first - at, 0), min(stop - at, batch.num_rows)
                at += batch.num_rows
                if begin < end:
                    yield pa.Table.from_batches([batch.slice(begin, end - begin)])

    return Table(meta.num_rows, size / max(meta.num_rows, 1), batches)


def _saved(source: Source, options: ReadOptions) -> Table:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(source.path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{source.path} is no readable saved dataset: {error}") from error
    if isinstance(found, DatasetDict):
        if options.hf_split not in found:
            raise UserError(
                f"{source.path} has the splits {', '.join(found)}, not {options.hf_split!r}; "
                "choose one with --hf-split"
            )
        found = found[options.hf_split]
    columns = _needed(source, options, found.column_names)
    rows = found.select_columns(columns).with_format("arrow")

    def batches(first: int, stop: int, step: int) -> Iterator[pa.Table]:
        for at in range(first, stop, step):
            yield rows[at : min(at + step, stop)]

    return Table(len(rows), source.size / max(len(rows), 1), batches)


def records(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table; one with a string that is no UTF-8 has bytes in place of its strings."""
    try:
        yield from table.to_pylist()
        return
    except UnicodeDecodeError:  # raised before the first row is yielded
        pass
    for number in range(table.num_rows):
        row = table.slice(number, 1)
        try:
            [record] = row.to_pylist()
        except UnicodeDecodeError:
            fields = [field.with_type(_as_binary(field.type)) for field in table.schema]
            [record] = row.cast(pa.schema(fields)).to_pylist()
        yield record


def _as_binary(kind: pa.DataType) -> pa.DataType:
    """The type with every string in it as bytes."""
    types = pa.types
    if types.is_string(kind):
        return pa.binary()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_string_view(kind):
        return pa.binary_view()
    if types.is_dictionary(kind):
        return _as_binary(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_binary(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_as_binary(kind.value_type)))
    if types.is_map(kind):
        return pa.map_(_as_binary(kind.key_type), _as_binary(kind.item_type))
    return kind


def _needed(source: Source, options: ReadOptions, present: list[str]) -> list[str]:
    missing = [name for name in options.columns if name not in present]
    if missing:
        raise UserError(
            f"{source.path} has the columns {', '.join(present)}, not {missing[0]!r}; "
            "name others with --json-keys and --domain-key"
        )
    doubled = [n for n in (*options.columns, *options.optional) if present.count(n) > 1]
    if doubled:
        raise UserError(
            f"{source.path} has {present.count(doubled[0])} columns {doubled[0]!r}, of which one "
            "would be lost: rename or drop one of them"
        )
    return [*options.columns, *(name for name in options.optional if name in present)]


def stream_hub(path: str, options: ReadOptions, *, skip: int) -> Iterator[dict[str, Any]]:
    """Rows of `hf://owner/name` through `datasets` streaming; a local folder works as well."""
    from datasets import load_dataset

    name = path.removeprefix("hf://")
    if not Path(name).exists():
        hub.require_name(name, flag="--input hf://")
        if not hub.is_reachable():
            raise UserError(f"--input {path}: the Hugging Face hub cannot be reached")
    try:
        stream = load_dataset(name, options.hf_config, split=options.hf_split, streaming=True)
    except Exception as error:  # datasets and its hub client raise many kinds
        raise UserError(
            f"--input {path}: the dataset could not be opened with --hf-split {options.hf_split}"
            f" --hf-config {options.hf_config}: {error}"
        ) from error
    for item in stream.skip(skip) if skip else stream:
        wanted = (*options.columns, *options.optional)
        yield {column: item[column] for column in wanted if column in item}
