"""What corpora in object stores need, by the arguments alone."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.datasets.object_storage_utils import (
    get_object_storage_access,
    is_object_storage_path,
)

from megatron_anchor import compat
from megatron_anchor.errors import UserError
from megatron_anchor.training.data_arguments import blends


def refusals(args: Namespace) -> Iterator[str]:
    """Say what is missing or does not go together with corpora in object stores."""
    try:
        prefixes = [prefix for _, blend in blends(args) for prefix in blend.prefixes]
    except UserError:
        return  # `data_arguments` says it
    stored = [prefix for prefix in prefixes if is_object_storage_path(prefix)]
    if not stored:
        return
    corpus = f"{stored[0]} is in an object store:"
    for flag, what in (
        ("--object-storage-cache-path", "copies of its .idx"),
        ("--data-cache-path", "the index of samples"),
    ):
        if getattr(args, flag.strip("-").replace("-", "_")) is None:
            yield f"{corpus} set {flag} to a folder that all ranks see, for {what}"
    if args.domain_tags:
        yield f"--domain-tags: {corpus} the domains beside it are not read; copy it to a disk"
    access = get_object_storage_access(stored[0])
    if access == "s3" and not compat.is_installed("boto3"):
        yield f"{corpus} boto3 is not installed, by which Megatron reads it; pip install boto3"
    if access == "msc" and not args.enable_msc:
        yield f"{corpus} pass --enable-msc (pip install multi-storage-client)"
