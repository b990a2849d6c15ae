"""Slow, obvious float64 truths that the tests judge by.

Legend: T slots, N query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.masks import dense_mask


def dense_attention(
    q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, mask_TT: Tensor, scale: float
) -> Tensor:
    """Softmax attention with a dense mask in the dtype of its inputs, no kernel involved."""
    copies = q_TND.shape[1] // k_TGD.shape[1]
    k, v = k_TGD.repeat_interleave(copies, 1), v_TGD.repeat_interleave(copies, 1)
    logits_NTT = torch.einsum("qnd,knd->nqk", q_TND, k) * scale
    weights_NTT = logits_NTT.masked_fill(~mask_TT, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights_NTT, v)


def document_mask(lengths: list[int]) -> Tensor:
    """[T, T] bool mask of packed documents, from the project's one predicate."""
    return torch.from_numpy(dense_mask(np.cumsum([0, *lengths])))


def gradients(function, inputs: list[Tensor], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run a function on detached inputs and return its output and their gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(upstream.to(output.dtype))
    return output.detach(), [leaf.grad for leaf in leaves]
