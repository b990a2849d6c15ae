"""Numbers of documents or domains in `.npy` files, as users and tools leave them."""

from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError


def map_ids(path: str | Path, *, what: str, remedy: str) -> np.ndarray:
    """Map a one-dimensional array of integers.

    Args:
        path: the `.npy`.
        what: the file, or the flag that names it, for messages.
        remedy: what the user can do, for messages.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error}; {remedy}") from error
    except (EOFError, ValueError) as error:
        raise UserError(
            f"{what} {path} is no .npy file of numbers, or is cut short; {remedy}"
        ) from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise UserError(f"{what} {path} holds {found}, expected integers in a row; {remedy}")
    return ids


def require_below(ids: np.ndarray, limit: int, *, what: str, of: str, remedy: str) -> None:
    """Refuse numbers outside [0, limit) with the first one and its place.

    Raises:
        UserError: there is one.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(wrong):
        raise UserError(
            f"{what} names {of} {ids[wrong[0]]} (entry {wrong[0]}), expected 0 to {limit - 1}"
            f"; {remedy}"
        )
