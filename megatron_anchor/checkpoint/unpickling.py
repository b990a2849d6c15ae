"""Reading pickles of checkpoints without executing what a stranger may have put there."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_anchor.checkpoint.archives import unpickling_error
from megatron_anchor.errors import UserError

CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    f"{CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{CHECKPOINT}.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}
"""Module to classes that the ``.metadata`` of a ``torch_dist`` checkpoint consists of."""


class _RefusedError(Exception):
    """Something that is not metadata was asked for."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        )
        if plain or (module, name) == ("torch", "Size") or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise _RefusedError(f"{module}.{name} is not part of checkpoint metadata")


def load_metadata(path: Path) -> Any:
    """Read the ``.metadata`` of a ``torch_dist`` checkpoint.

    Raises:
        UserError: if it is missing or damaged, or asks for anything but torch's own metadata
            classes, which is then never executed.
    """
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist; expected a torch_dist checkpoint (--ckpt-format torch_dist)"
        ) from error
    except _RefusedError as error:
        raise UserError(
            f"{path}: refused to unpickle: {error}. Megatron itself would execute this file; do "
            "not load the checkpoint unless you trust its source"
        ) from error
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise UserError(f"{path} is damaged: {error!r}; copy it again") from error
    if not isinstance(metadata, Metadata) or not metadata.storage_data:
        raise UserError(
            f"{path} is no metadata of a torch_dist checkpoint but {type(metadata).__name__}"
        )
    return metadata


def load_object(data: bytes, *, place: str) -> Any:
    """Read an object that Megatron stored with ``torch.save``, such as the arguments of a run.

    Importing megatron.core tells torch's weights-only unpickler about Megatron's plain classes.

    Raises:
        UserError: if it asks for anything else, which is then never executed.
    """
    import megatron.core  # noqa: F401

    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # damaged pickles raise anything
        raise unpickling_error(error, place=place) from error
