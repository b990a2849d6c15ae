"""The whole run: inputs -> chunks -> encoded -> `.bin/.idx`, manifest and domains."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from megatron_anchor.corpus.chat_encoding import TOO_LONG, ChatSettings
from megatron_anchor.corpus.encoding import EncodeConfig
from megatron_anchor.corpus.folders import counted, described
from megatron_anchor.corpus.identity import (
    lasting_identity,
    require_finished_same,
    run_identity,
)
from megatron_anchor.corpus.output import CorpusOutput, Progress
from megatron_anchor.corpus.pool import make_pool
from megatron_anchor.corpus.readers import Chunk, ReadOptions, read_span
from megatron_anchor.corpus.rejections import RowError
from megatron_anchor.corpus.rows import RowOptions, parse_chunk
from megatron_anchor.corpus.sentences import SplitterConfig, make_splitter, model_digest
from megatron_anchor.corpus.sources import (
    Inputs,
    Source,
    Span,
    count_lines_before,
    domain_of,
    parse_shard,
    plan,
    resolve,
)
from megatron_anchor.corpus.weight_options import (
    checked_chat,
    idle_weight_options,
    require_weight_options,
    run_notes,
    weight_dtype_of,
    weighted_tokens,
    weights_from,
)
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import KeyManifest, manifest_path
from megatron_anchor.indexed.pair import idx_path, token_dtype
from megatron_anchor.tokenizers import (
    EngineRecipe,
    Tokenizer,
    TokenizerConfig,
    choose_engine,
    load_tokenizer,
)

NO_ENGINE = "none"
_SAMPLE_TEXTS = 64
_SAMPLE_CHARACTERS = 4_000
_CHUNK_KB = 256  # for a worker process: some tenths of a second of work
_SHARED_CHUNK_KB = 8192  # for an engine that spreads one chunk over all cores


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """All settings of a run; the fields are the command line's flags."""

    input: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    json_keys: tuple[str, ...] = ("text",)
    input_format: str | None = None
    domain: tuple[str, ...] = ()
    domain_key: str | None = None
    pretokenized: bool = False
    chat: bool = False
    chat_template: str | None = None
    chat_template_kwargs: str | None = None
    tools_key: str = "tools"
    max_conversation_tokens: int | None = None
    long_conversations: str = TOO_LONG[0]
    weight_key: str | None = None
    weight_dtype: str = "float32"
    hf_split: str = "train"
    hf_config: str | None = None
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str = "english"
    punkt_path: str | None = None
    workers: int = 0
    """0: as many as there are cores for this process."""
    on_error: str = "stop"
    max_row_mb: int = 100
    shard: str | None = None
    resume: bool = False
    overwrite: bool = False
    chunk_kb: int = 0
    """Text that a worker gets at once; 0: what suits the engine."""
    checkpoint_seconds: float = 10.0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise UserError(f"--on-error {self.on_error}: expected stop or skip")
        if self.pretokenized and len(self.json_keys) != 1:
            raise UserError("pre-tokenized rows have one key of ids; give a single --json-keys")
        if self.pretokenized and self.split_sentences:
            raise UserError("--split-sentences needs text, and rows of --pretokenized hold ids")
        require_weight_options(self)
        bad = [key for key in self.json_keys if not key or os.sep in key]
        if bad or len(set(self.json_keys)) != len(self.json_keys):
            raise UserError(f"--json-keys {list(self.json_keys)}: expected different names")
        if self.max_row_mb < 1:
            raise UserError(f"--max-row-mb {self.max_row_mb}: expected at least 1")
        for name in ("workers", "chunk_kb", "checkpoint_seconds"):
            if not getattr(self, name) >= 0:  # nor NaN
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: below 0")

    @property
    def notes(self) -> list[str]:
        """Settings that have no effect, for the user to know."""
        of_sentences = {
            "--keep-newlines": self.keep_newlines,
            "--lang": self.lang != "english",
            "--punkt-path": self.punkt_path is not None,
        }
        given = [flag for flag, is_given in of_sentences.items() if is_given]
        without = [f"{flag} has no effect without --split-sentences" for flag in given]
        return [*([] if self.split_sentences else without), *idle_weight_options(self)]


@dataclass(frozen=True)
class Summary:
    """What a run did; only the times and `processed_bytes` differ between equal corpora."""

    prefixes: list[str]
    documents: list[int]
    tokens: list[int]
    rows_read: int
    rejected: dict[str, int]
    rejected_file: str | None
    empty_documents: list[int]
    empty_kept: list[int]
    text_bytes: int
    processed_bytes: int
    """Of `text_bytes`, what this run did; less where it went on from an earlier one."""
    domains: list[str]
    engine: str
    notes: list[str]
    seconds: float
    """Of the whole run, loading included."""
    processing_seconds: float
    """From the moment when all workers were ready."""
    weighted_tokens: list[int] = field(default_factory=list)
    """Tokens that are learned, by corpus; empty where all are."""
    conversations: dict[str, int] = field(default_factory=dict)
    """Counts of --chat."""


def preprocess(config: PreprocessConfig) -> Summary:
    """Make the corpora that `config` asks for, one a JSON key.

    Raises `UserError` with place and remedy; then nothing carries a final name, and what is
    finished stays in `OUTPUT_PREFIX.partial` for `resume`.
    """
    began = time.monotonic()
    inputs = resolve(
        config.input,
        domains=config.domain,
        input_format=config.input_format,
        hf_split=config.hf_split,
    )
    sources = inputs.sources
    tokenizer = load_tokenizer(config.tokenizer)
    if config.append_eod and tokenizer.eod_id is None:
        raise UserError(
            f"--append-eod: the tokenizer {tokenizer.path} has no end-of-document token; name one "
            "with --eod-token or --eod-id, or leave --append-eod away"
        )
    splitter = _splitter(config)
    spans = _plan(config, sources)
    chat = checked_chat(config, tokenizer)
    identity = run_identity(
        config,
        sources,
        tokenizer.fingerprint(),
        punkt=model_digest(splitter) if splitter else None,
        template=chat.template.identity if chat else None,
    )
    output = CorpusOutput(
        config.output_prefix,
        keys=config.json_keys,
        level="sentence" if config.split_sentences else "document",
        dtype=token_dtype(tokenizer.vocab_size),
        identity=identity,
        resume=config.resume,
        overwrite=config.overwrite,
        checkpoint_seconds=config.checkpoint_seconds,
        weight_dtype=weight_dtype_of(config),
    )
    if output.already_finished:
        return _finished_before(config, output, identity)
    try:
        return _process(config, output, tokenizer, inputs, spans, splitter, chat, began=began)
    except BaseException:
        if not output.progress.rows_read:
            output.discard()  # the next run needs neither --resume nor --overwrite
        raise
    finally:
        output.close()


def _process(
    config: PreprocessConfig,
    output: CorpusOutput,
    tokenizer: Tokenizer,
    inputs: Inputs,
    spans: list[Span],
    splitter: SplitterConfig | None,
    chat: ChatSettings | None,
    *,
    began: float,
) -> Summary:
    sources = inputs.sources
    workers = config.workers or len(os.sched_getaffinity(0))
    recipe, note = _engine(config, tokenizer, sources, spans, workers=workers)
    encode = EncodeConfig(
        recipe=recipe,
        rows=_row_options(config, tokenizer),
        dtype=output.dtype,
        prefix=() if config.pretokenized or chat else tokenizer.prefix,
        suffix=() if config.pretokenized or chat else tokenizer.suffix,
        eod_id=tokenizer.eod_id if config.append_eod and not chat else None,
        splitter=splitter,
        threads=workers if recipe.shares_threads else 1,
        chat=chat,
        weight_dtype=output.weight_dtype,
    )
    ready, bytes_before = time.monotonic(), output.progress.text_bytes
    if not output.progress.complete:
        if not config.pretokenized:
            made_by = chat.versions if chat else recipe.versions
            output.progress.engines = sorted({*output.progress.engines, *made_by})
        ready = _run(config, output, sources, spans, encode, workers=workers)
        _check_not_empty(config, output)
    manifests = output.finish(
        _manifest_fields(config, tokenizer, inputs, output),
        weights_from=weights_from(
            config, chat, fingerprint=tokenizer.fingerprint(), counts=output.progress.chat
        ),
    )
    return _summary(
        output,
        manifests,
        notes=[*described(inputs.passed_over), note, *run_notes(config, tokenizer, chat)],
        engine=recipe.name,
        began=began,
        ready=ready,
        bytes_before=bytes_before,
    )


def _splitter(config: PreprocessConfig) -> SplitterConfig | None:
    if not config.split_sentences:
        return None
    splitter = SplitterConfig(config.lang, config.keep_newlines, config.punkt_path)
    make_splitter(splitter)  # a missing model is told at once, not by a worker
    return splitter


def _read_options(config: PreprocessConfig, *, shared: bool = False) -> ReadOptions:
    needed, optional = list(config.json_keys), ["source"] if config.pretokenized else []
    if config.chat:
        optional.append(config.tools_key)
    if config.weight_key:
        needed.append(config.weight_key)
    if config.domain_key:
        (optional if config.domain else needed).append(config.domain_key)
    columns, spare = (dict.fromkeys(k.split(".")[0] for k in keys) for keys in (needed, optional))
    return ReadOptions(
        chunk_bytes=(config.chunk_kb or (_SHARED_CHUNK_KB if shared else _CHUNK_KB)) << 10,
        max_row_bytes=config.max_row_mb << 20,
        columns=tuple(columns),
        optional=tuple(name for name in spare if name not in columns),
        hf_split=config.hf_split,
        hf_config=config.hf_config,
    )


def _row_options(config: PreprocessConfig, tokenizer: Tokenizer) -> RowOptions:
    return RowOptions(
        keys=config.json_keys,
        domain_key=config.domain_key,
        domain_fallback=bool(config.domain),
        max_row_bytes=config.max_row_mb << 20,
        pretokenized=config.pretokenized,
        vocab_size=tokenizer.vocab_size,
        chat=config.chat,
        tools_key=config.tools_key,
        weight_key=config.weight_key,
        weight_dtype=config.weight_dtype,
    )


def _plan(config: PreprocessConfig, sources: list[Source]) -> list[Span]:
    shard = parse_shard(config.shard)
    if shard[1] == 1:
        return plan(sources)
    rows: list[int | None] = [None] * len(sources)
    if any(source.format in ("parquet", "dataset") for source in sources):
        from megatron_anchor.corpus.tables import count_rows

        rows = [count_rows(source, _read_options(config)) for source in sources]
    return plan(sources, shard=shard, rows=rows)


def _chunks(
    config: PreprocessConfig,
    sources: list[Source],
    spans: list[Span],
    start: Progress,
    *,
    shared: bool = False,
) -> Iterator[tuple[int, Chunk]]:
    """All chunks from a place on, with the number of their span."""
    options = _read_options(config, shared=shared)
    for number in range(start.span, len(spans)):
        span = spans[number]
        first = number == start.span
        for chunk in read_span(
            sources,
            span,
            options,
            offset=start.offset if first else 0,
            row=start.row if first else 0,
            domain=domain_of(sources[span.source]),
        ):
            yield number, chunk


def _engine(
    config: PreprocessConfig,
    tokenizer: Tokenizer,
    sources: list[Source],
    spans: list[Span],
    *,
    workers: int,
) -> tuple[EngineRecipe, str]:
    if config.pretokenized:
        return tokenizer.native, "rows hold ids already"
    if config.chat:
        return tokenizer.native, f"engine {tokenizer.native.name}, which tells where tokens stand"
    sample: list[str] = []
    if tokenizer.fast is not None and config.tokenizer.engine != "native":
        sample = _sample(config, tokenizer, sources, spans)
    return choose_engine(tokenizer, wanted=config.tokenizer.engine, sample=sample, threads=workers)


def _sample(
    config: PreprocessConfig, tokenizer: Tokenizer, sources: list[Source], spans: list[Span]
) -> list[str]:
    """Texts from the head of the corpus, to compare engines on."""
    texts: list[str] = []
    for _, chunk in itertools.islice(_chunks(config, sources, spans, Progress()), 4):
        for document in parse_chunk(chunk, _row_options(config, tokenizer)).documents:
            texts += [text[:_SAMPLE_CHARACTERS] for value in document.values for text in value]
            if len(texts) >= _SAMPLE_TEXTS:
                return texts[:_SAMPLE_TEXTS]
    return texts


def _run(
    config: PreprocessConfig,
    output: CorpusOutput,
    sources: list[Source],
    spans: list[Span],
    encode: EncodeConfig,
    *,
    workers: int,
) -> float:
    """Encode and append everything; returns the time when all workers were ready."""
    start = replace(output.progress)
    numbers: dict[int, int] = {}  # chunk -> span, while the chunk is in flight

    def numbered() -> Iterator[Chunk]:
        for number, chunk in _chunks(
            config, sources, spans, start, shared=encode.recipe.shares_threads
        ):
            numbers[id(chunk)] = number
            yield chunk

    sizes = [_span_bytes(sources, span) for span in spans]
    bar = tqdm(
        total=sum(sizes) or None,
        initial=sum(sizes[: start.span]),
        unit="B",
        unit_scale=True,
        disable=not config.progress,
        desc="tokenize",
    )
    pool = make_pool(encode, workers=workers)
    began, before = time.monotonic(), output.progress.documents[0]
    try:
        for chunk, encoded in pool.map(numbered()):
            number = numbers.pop(id(chunk))
            if encoded.rejections and spans[number].start:
                base = count_lines_before(sources[chunk.source], spans[number])
                encoded.rejections = [replace(r, row=r.row + base) for r in encoded.rejections]
            if encoded.rejections and config.on_error == "stop":
                output.checkpoint()
                kept = str(output.folder) if output.progress.rows_read else ""
                raise RowError(encoded.rejections[0], kept)
            output.append(
                encoded,
                source=chunk.source,
                span=number,
                offset=chunk.next_offset,
                row=chunk.next_row,
            )
            bar.update(chunk.bytes_read)
            rate = (output.progress.documents[0] - before) / max(time.monotonic() - began, 1e-9)
            bar.set_postfix_str(f"{rate:.0f} documents/s", refresh=False)
    finally:
        bar.close()
        pool.close()
    return began


def _span_bytes(sources: list[Source], span: Span) -> int:
    source = sources[span.source]
    if source.format == "jsonl" and span.end is not None:
        return span.end - span.start
    return source.size


def _check_not_empty(config: PreprocessConfig, output: CorpusOutput) -> None:
    if config.shard is not None:
        return  # a job array may have more shards than rows; merging copes
    for key, tokens in zip(output.keys, output.progress.tokens, strict=True):
        if not tokens:
            state = output.progress
            output.discard()
            listed = f", listed in {output.rejected_path}" if state.rejected else ""
            raise UserError(
                f"no document was written for {key!r}: {state.rows_read} rows read, "
                f"{state.rejected_rows} rejected{listed}, {sum(state.empty)} empty; a corpus "
                "without documents cannot be opened"
            )
    if output.weight_dtype is not None and not all(output.progress.weighted):
        state = output.progress
        output.discard()
        key = output.keys[state.weighted.index(0)]
        raise UserError(
            f"all {state.tokens[state.weighted.index(0)]} tokens of {key!r} have the weight 0, so "
            f"there is nothing to learn; check what {config.weight_key!r} holds"
        )


def _manifest_fields(
    config: PreprocessConfig,
    tokenizer: Tokenizer,
    inputs: Inputs,
    output: CorpusOutput,
) -> dict[str, Any]:
    rows = output.progress.source_rows
    return {
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id if config.append_eod else None,
        "bos_id": tokenizer.bos_id,
        "tokenizer": {
            "kind": tokenizer.kind,
            "path": tokenizer.path,
            "fingerprint": tokenizer.fingerprint(),
            "engines": output.progress.engines,
        },
        "sources": [
            {"path": source.path, "bytes": source.size, "rows": rows[str(number)]}
            for number, source in enumerate(inputs.sources)
            if str(number) in rows
        ],
        "passed_over": counted(inputs.passed_over),
        "shard": config.shard,
        "settings": lasting_identity(output.identity),
    }


def _summary(
    output: CorpusOutput,
    manifests: list[KeyManifest],
    *,
    notes: list[str],
    engine: str,
    began: float,
    ready: float,
    bytes_before: int,
) -> Summary:
    first = manifests[0]
    prefixes = [str(output.corpus_prefix(manifest.key)) for manifest in manifests]
    weighted, conversations = weighted_tokens(prefixes)
    return Summary(
        prefixes=prefixes,
        documents=[manifest.documents for manifest in manifests],
        tokens=[manifest.tokens for manifest in manifests],
        rows_read=first.rows_read,
        rejected=first.rejected,
        rejected_file=str(output.rejected_path) if first.rejected else None,
        empty_documents=[manifest.empty_documents for manifest in manifests],
        empty_kept=[manifest.empty_kept for manifest in manifests],
        text_bytes=first.text_bytes,
        processed_bytes=first.text_bytes - bytes_before,
        domains=[domain.name for domain in first.domains],
        engine=engine,
        notes=notes,
        seconds=round(time.monotonic() - began, 3),
        processing_seconds=round(time.monotonic() - ready, 3),
        weighted_tokens=weighted,
        conversations=conversations,
    )


def _finished_before(
    config: PreprocessConfig, output: CorpusOutput, identity: Mapping[str, Any]
) -> Summary:
    prefixes = [output.corpus_prefix(key) for key in config.json_keys]
    missing = [path for path in output.final_paths if not path.exists()]
    if missing:
        raise UserError(
            f"--resume: {missing[0]} is missing beside what was finished before, so it is not "
            "known what that holds; use --overwrite to make it anew"
        )
    manifests = [KeyManifest.read(manifest_path(prefix)) for prefix in prefixes]
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        require_finished_same(manifest, identity, finished=idx_path(prefix))
    now = time.monotonic()
    note = "the corpus was finished already; nothing was done"
    return _summary(
        output,
        manifests,
        notes=[note],
        engine=NO_ENGINE,
        began=now,
        ready=now,
        bytes_before=manifests[0].text_bytes,
    )
