"""The shards of one corpus on many machines: planned here, run by Ray, merged here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from megatron_anchor.corpus.locks import locked
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.corpus.preprocess import PreprocessConfig, Summary, preprocess
from megatron_anchor.corpus.rejections import RowError
from megatron_anchor.corpus.weight_options import weighted_tokens
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import KeyManifest, domains_path, manifest_path
from megatron_anchor.indexed.weights import weights_manifest_path, weights_path
from megatron_anchor.whole_files import atomic_write


def shard_configs(config: PreprocessConfig, shards: int) -> list[PreprocessConfig]:
    """One config a shard; outputs lie in `OUTPUT_PREFIX.shards/`."""
    if config.shard is not None:
        raise UserError("--shard names one part; --executor ray makes all parts by itself")
    folder = Path(f"{config.output_prefix}.shards")
    return [
        replace(
            config,
            output_prefix=str(folder / f"{number}_of_{shards}"),
            shard=f"{number}/{shards}",
            resume=config.resume or not config.overwrite,
            progress=False,
        )
        for number in range(shards)
    ]


def preprocess_on_ray(config: PreprocessConfig, *, shards: int = 0) -> Summary:
    """Run all shards as Ray tasks of `config.workers` CPUs each, then merge them.

    `shards` 0 makes one a node-sized share of the cluster's CPUs. Inputs and outputs must lie where
    every node sees them. A failed run keeps its finished shards for `resume`.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UserError("--executor ray needs `pip install ray`") from error
    with locked(Path(f"{config.output_prefix}.shards.lock"), output=config.output_prefix):
        _check_outputs(config)
        return _run_all(config, shards=shards)


def _run_all(config: PreprocessConfig, *, shards: int) -> Summary:
    import ray

    began = time.monotonic()
    started = not ray.is_initialized()
    if started:
        _start_ray()
    try:
        cores = int(ray.cluster_resources().get("CPU", 1))
        workers = min(config.workers or 1, cores)
        count = shards or max(1, cores // workers)
        configs = shard_configs(replace(config, workers=workers), count)
        task = ray.remote(num_cpus=workers, max_retries=0)(_run_shard)
        pending = {task.remote(one): number for number, one in enumerate(configs)}
        summaries: list[Summary | None] = [None] * count
        bar = tqdm(total=count, desc="shards", disable=not config.progress)
        with bar:
            while pending:
                [ready], _ = ray.wait(list(pending), num_returns=1)
                number = pending.pop(ready)
                try:
                    summaries[number] = ray.get(ready)
                except ray.exceptions.RayError as error:
                    for other in pending:
                        ray.cancel(other, force=True)
                    folder = Path(f"{config.output_prefix}.shards")
                    raise _readable(error, configs[number], folder=folder) from error
                bar.update()
    finally:
        if started:
            ray.shutdown()
    merged = _merge(config, configs, [s for s in summaries if s is not None])
    return replace(merged, seconds=round(time.monotonic() - began, 3))


def _start_ray() -> None:
    """Join the cluster at RAY_ADDRESS, or start a local Ray where that is not set."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=None if address else False)
    except Exception as error:  # Ray raises bare Exceptions here
        raise UserError(f"Ray could not be started (RAY_ADDRESS={address}): {error}") from error


def _run_shard(config: PreprocessConfig) -> Summary:
    return preprocess(config)


def _readable(error: Exception, shard: PreprocessConfig, *, folder: Path) -> UserError:
    """The shard's own message without Ray's traceback, and what is left to go on from."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RowError):
        cause = RowError(cause.rejection)  # the shard's own folder is no place to go on from
    if isinstance(cause, UserError):
        why = f"shard {shard.shard}: {cause}"
    else:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        why = f"shard {shard.shard} failed on Ray ({last})"
    if not folder.is_dir() or not any(folder.iterdir()):
        return UserError(why)
    return UserError(
        f"{why}. What was finished is kept in {folder}: add --resume to go on from there, or "
        "--overwrite to begin anew"
    )


def _check_outputs(config: PreprocessConfig) -> None:
    if config.overwrite or config.resume:
        return
    level = "sentence" if config.split_sentences else "document"
    for key in config.json_keys:
        path = Path(f"{config.output_prefix}_{key}_{level}.idx")
        if path.exists():
            raise UserError(f"{path} exists; choose another --output-prefix or --overwrite")


def _merge(
    config: PreprocessConfig, configs: Sequence[PreprocessConfig], summaries: Sequence[Summary]
) -> Summary:
    level = "sentence" if config.split_sentences else "document"
    manifests: list[KeyManifest] = []
    for number, key in enumerate(config.json_keys):
        parts = [summary.prefixes[number] for summary in summaries]
        if not sum(summary.tokens[number] for summary in summaries):
            raise UserError(f"no document was written for {key!r} in any shard")
        merged = merge_corpora(
            parts,
            f"{config.output_prefix}_{key}_{level}",
            overwrite=config.overwrite or config.resume,
            progress=config.progress,
        )
        assert merged is not None
        manifests.append(merged)
    rejected_file = _gather_rejected(config, configs)
    _remove(Path(f"{config.output_prefix}.shards"), summaries, configs)
    first = manifests[0]
    prefixes = [f"{config.output_prefix}_{key}_{level}" for key in config.json_keys]
    weighted, conversations = weighted_tokens(prefixes)
    return Summary(
        prefixes=prefixes,
        documents=[manifest.documents for manifest in manifests],
        tokens=[manifest.tokens for manifest in manifests],
        rows_read=first.rows_read,
        rejected=first.rejected,
        rejected_file=rejected_file,
        empty_documents=[manifest.empty_documents for manifest in manifests],
        empty_kept=[manifest.empty_kept for manifest in manifests],
        text_bytes=first.text_bytes,
        processed_bytes=sum(summary.processed_bytes for summary in summaries),
        domains=[domain.name for domain in first.domains],
        engine=summaries[0].engine,
        notes=[f"{len(summaries)} shards on Ray", *summaries[0].notes],
        seconds=max(summary.seconds for summary in summaries),
        processing_seconds=max(summary.processing_seconds for summary in summaries),
        weighted_tokens=weighted,
        conversations=conversations,
    )


def _gather_rejected(config: PreprocessConfig, configs: Sequence[PreprocessConfig]) -> str | None:
    parts = [Path(f"{one.output_prefix}.rejected.jsonl") for one in configs]
    found = [part for part in parts if part.exists()]
    if not found:
        return None
    final = Path(f"{config.output_prefix}.rejected.jsonl")
    with atomic_write(final) as stream:
        for part in found:
            stream.write(part.read_bytes())
    return str(final)


def _remove(
    folder: Path, summaries: Sequence[Summary], configs: Sequence[PreprocessConfig]
) -> None:
    """Delete the shards, which the merged corpus replaces; nothing else in the folder."""
    paths: list[Callable[[str], Path]] = [
        lambda p: Path(f"{p}.bin"),
        lambda p: Path(f"{p}.idx"),
        domains_path,
        manifest_path,
        weights_path,
        weights_manifest_path,
    ]
    for summary in summaries:
        for prefix in summary.prefixes:
            for path in paths:
                path(prefix).unlink(missing_ok=True)
    for one in configs:
        Path(f"{one.output_prefix}.rejected.jsonl").unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
