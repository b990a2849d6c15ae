"""Every kernel that imports against dense attention in float64, by the error floor.

python benchmarks/gpu_kernels.py --output kernels.json
python benchmarks/gpu_kernels.py --device cpu --quick --output /tmp/kernels.json
"""

from __future__ import annotations

import itertools
from functools import partial

import gpu_checks
import torch

from megatron_anchor.attention.backends import BACKENDS

HEADS = ((8, 2), (4, 4))
GROUPS = (tuple(name for name in BACKENDS if name != "flex"), ("flex",))
"""Those that compile for each kind of call come last, so that they leave the others their time."""

HEAD_DIMS, QUICK_HEAD_DIMS = (128, 64, 256), (16,)


def cases(*, quick: bool, device: str) -> list:
    """All cases, the common ones first; the 2000 documents, which take longest, last."""
    from tests.kernel_oracle import LENGTHS, Case

    dtypes = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float32,)
    head_dims = QUICK_HEAD_DIMS if quick else HEAD_DIMS
    found = [
        Case(documents=documents, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        for dtype, head_dim, (heads, kv_heads), documents in itertools.product(
            dtypes, head_dims, HEADS[:1] if quick else HEADS, LENGTHS
        )
    ]
    return sorted(found, key=lambda case: len(LENGTHS[case.documents]) > 1000)


def share(name: str, case, device: str) -> tuple[float, str]:
    """The largest share of output and gradients, and which it is."""
    from tests.kernel_oracle import error_shares

    worst = max(error_shares(name, case, device=device), key=lambda found: found.of_allowed)
    return worst.of_allowed, worst.which


def main() -> None:
    """Go through all cases, each with every kernel."""
    options = gpu_checks.parse(__doc__)
    checks = gpu_checks.Checks(options)
    from tests.kernel_oracle import UnavailableError, bind_kernel

    usable = {name: True for name in BACKENDS}
    found = cases(quick=options.quick, device=options.device)
    for case, group in [(case, group) for group in GROUPS for case in found]:
        shape = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
        for name in [name for name in group if usable[name]]:
            try:
                bind_kernel(name, **shape, dtype=case.dtype, scale=1.0)
            except UnavailableError as reason:
                checks.leave_out(name, f"{case.name}: {reason}")
                usable[name] = any(row["check"] == name and row["case"] for row in checks.rows)
                continue
            except Exception:  # the check itself fails in the same way, with its reason
                pass
            checks.run(name, case.name, partial(share, name, case, options.device))


if __name__ == "__main__":
    main()
