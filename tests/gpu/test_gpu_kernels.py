"""Every kernel that this machine has, against the float64 oracle, by the error-floor rule."""

import pytest
import torch

from megatron_anchor.attention.backends import BACKENDS
from tests.kernel_oracle import (
    LENGTHS,
    Case,
    UnavailableError,
    bind_kernel,
    error_shares,
    packed_documents,
)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("documents", LENGTHS)
def test_kernel_stays_at_the_error_floor(name, documents, heads, head_dim, dtype):
    case = Case(
        documents=documents, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype
    )
    try:
        shares = error_shares(name, case, device="cuda")
    except UnavailableError as reason:
        pytest.skip(f"{name}: {reason}")
    assert all(share.of_allowed <= 1 for share in shares), (name, shares)


@pytest.mark.parametrize("name", BACKENDS)
def test_documents_do_not_see_each_other(name):
    """Changing the first document leaves the others' outputs as they are, bit for bit."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
    try:
        attend = bind_kernel(name, **shape, scale=128**-0.5)
    except UnavailableError as reason:
        pytest.skip(f"{name}: {reason}")
    packed = packed_documents([130, 70, 200], device="cuda")
    q, k, v = (torch.randn(400, n, 128, device="cuda").bfloat16() for n in (4, 2, 2))
    before = attend(q, k, v, runs=packed.runs(), scale=128**-0.5, dropout=0.0)
    for x in (q, k, v):
        x[:130] = torch.randn_like(x[:130])
    after = attend(q, k, v, runs=packed.runs(), scale=128**-0.5, dropout=0.0)
    assert torch.equal(before[130:], after[130:])
    assert not torch.equal(before[:130], after[:130])
