"""Run Transformer Engine's own Python code without a GPU and without its compiled extension.

`install` puts a Python module in the place of ``transformer_engine_torch``. Its enumerations are
made up; its functions for packed documents (``thd_*``) and its fused attention are written over
torch here, from the descriptions in Transformer Engine's docstrings. Everything above them, the
argument checks, the choice of a kernel, the context parallelism, is Transformer Engine's real code.

Legend: T slots of a rank, H heads, D head dim, n documents, P context-parallel ranks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.varlen_reference import attend_documents, attend_documents_backward

EXTENSION = "transformer_engine_torch"
MISSING = "Transformer Engine's Python code is not installed: run `make test-te`"


def is_usable() -> bool:
    """Say whether Transformer Engine's Python code is there, and its compiled extension is not."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        return False
    if isinstance(sys.modules.get(EXTENSION), _Extension):
        return True
    # A wheel puts the compiled extension next to the package, a build from source inside it.
    folder = Path(spec.submodule_search_locations[0])
    return importlib.util.find_spec(EXTENSION) is None and not any(folder.rglob(f"{EXTENSION}*.so"))


class _MadeUpEnum(type):
    """A C++ enumeration whose members come into being when they are asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Member(len(cls.members))
        value.name = name
        cls.members[name] = value
        setattr(cls, name, value)
        return value

    def __instancecheck__(cls, instance: Any) -> bool:
        return any(instance is member for member in cls.members.values())


class _Member(int):
    name: str

    def __repr__(self) -> str:
        return self.name


class _Extension(ModuleType):
    """Functions defined here, enumerations for capitalised names, refusal for all else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _MadeUpEnum(name, (), {"members": {}})
        else:
            made = _not_here(name)
        setattr(self, name, made)
        return made


def _not_here(name: str) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"tests/te_stand_in.py has no transformer_engine_torch.{name}")

    return function


def install() -> ModuleType:
    """Import Transformer Engine over the stand-in; later calls give the same module."""
    if EXTENSION in sys.modules:
        return sys.modules[EXTENSION]
    extension = _Extension(EXTENSION)
    extension.DType = IntEnum(
        "DType",
        "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
        start=0,
    )
    extension.NVTE_Fused_Attn_Backend = IntEnum(
        "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8", start=0
    )
    extension.calls = []
    extension.get_cudnn_version = lambda: 92000
    extension.get_fused_attn_backend = _fused_attention_backend
    for function in FUNCTIONS:
        setattr(extension, function.__name__, function)
    sys.modules[EXTENSION] = extension
    # Skips loading CUDA libraries; the modules themselves are imported as always.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None, MISSING
    _import_over(extension)
    del os.environ["NVTE_PROJECT_BUILDING"]
    return extension


def _import_over(extension: ModuleType) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common as common

        for name in [n for n in sys.modules if n.startswith("transformer_engine.pytorch")]:
            del sys.modules[name]
        sys.modules[EXTENSION] = extension
        common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch.attention.dot_product_attention.context_parallel as cp

    # Megatron then takes its own optimizers and gradient norms in place of fused kernels.
    blocked: Any = sys.modules
    blocked["transformer_engine.pytorch.optimizers"] = None
    exchange = cp.flash_attn_p2p_communicate

    def exchange_at_once(*args: Any, **kwargs: Any) -> list:
        # On one thread a gloo transfer must end before its buffer is written again; on a GPU the
        # stream orders them.
        for transfer in exchange(*args, **kwargs):
            transfer.wait()
        return []

    cp.flash_attn_p2p_communicate = exchange_at_once


def _fused_attention_backend(parameters: Any) -> tuple[int, str]:
    """Stand in for cuDNN's answer: yes to 16 bits."""
    return 1, ""


# Attention.


def fused_attn_fwd(max_q, max_kv, training, scale, dropout, *rest):
    """Attend as cuDNN does: cu_seqlens give lengths, cu_seqlens_padded where they begin."""
    mask, (cu_q, cu_kv, q, k, v), (offsets_q, offsets_kv) = rest[5], rest[9:14], rest[15:17]
    _record("fused_attn_fwd", mask, cu_q, cu_kv, max_q, max_kv)
    assert dropout == 0.0
    out, lse = attend_documents(
        q, k, v, cu_q, cu_kv, scale=scale, offsets=(offsets_q, offsets_kv), **_kind(mask)
    )
    return out, lse[..., None], torch.zeros(2, dtype=torch.int64)


def fused_attn_bwd(max_q, max_kv, scale, dropout, *rest):
    """Differentiate `fused_attn_fwd` from its log-sum-exp."""
    mask, (cu_q, cu_kv, q, k, v, out, grad) = rest[8], rest[13:20]
    aux, offsets = rest[21], rest[22:24]
    _record("fused_attn_bwd", mask, cu_q, cu_kv, max_q, max_kv)
    dq, dk, dv = attend_documents_backward(
        grad,
        out,
        aux[0].squeeze(-1),
        (q, k, v, cu_q, cu_kv),
        scale=scale,
        offsets=offsets,
        **_kind(mask),
    )
    return dq, dk, dv, None


def _record(name, mask, cu_q, cu_kv, max_q, max_kv):
    assert cu_q.dtype == cu_kv.dtype == torch.int32
    assert max_q >= cu_q.diff().max()
    assert max_kv >= cu_kv.diff().max()
    sys.modules[EXTENSION].calls.append((name, mask.name))


def _kind(mask: Any) -> dict[str, bool]:
    name = mask.name
    return {"causal": "CAUSAL" in name, "bottom_right": "BOTTOM_RIGHT" in name}


# Packed documents of one rank. `halves` are the first and the second chunk of every document.


def _halves(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the first and second half of every document, on one rank."""
    borders = cu_seqlens.tolist()
    first, second = [], []
    for a, b in pairwise(borders):
        middle = (a + b) // 2
        first += range(a, middle)
        second += range(middle, b)
    return torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64)


def thd_read_half_tensor(x_THD: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """Take one half of every document; the tensor may have a dimension in front."""
    index = _halves(cu_seqlens)[half]
    return x_THD.index_select(0 if x_THD.dim() == 3 else 1, index)


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    """Take the second half of a [H, T] log-sum-exp."""
    assert packed
    return lse.index_select(1, _halves(cu_seqlens)[1])


def thd_second_half_lse_correction(
    lse: Tensor, lse_step: Tensor, cu_seqlens: Tensor, packed: bool
) -> None:
    """Add the second half's part of a step to a [H, T] log-sum-exp."""
    assert packed
    index = _halves(cu_seqlens)[1]
    lse[:, index] = torch.logaddexp(lse[:, index], lse_step)


def thd_out_correction(
    out: Tensor,
    out_step: Tensor,
    lse_before: Tensor,
    lse: Tensor,
    lse_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    """Rescale what was summed up so far and add a step's output."""
    assert packed
    index = _halves(cu_seqlens)[1] if only_second_half else torch.arange(len(out))
    old = (lse_before[:, index] - lse[:, index]).exp().t()[..., None]
    new = (lse_step - lse[:, index]).exp().t()[..., None]
    out[index] = (out[index].float() * old + out_step.view(-1, *out.shape[1:]) * new).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_step: Tensor, cu_seqlens: Tensor, first: str, second: str
) -> None:
    """Put a step's gradient into the halves: ``add``, ``copy``, ``zero`` or ``none``."""
    halves = _halves(cu_seqlens)
    partial = len(grad_step) != len(grad)
    for index, what in zip(halves, (first, second), strict=True):
        if what == "zero":
            grad[index] = 0
        elif what != "none":
            part = grad_step if partial else grad_step[index]
            grad[index] = part if what == "copy" else grad[index] + part


# Whole documents, over all ranks.


def _rank_order(cu_seqlens: Tensor, ranks: int) -> Tensor:
    borders = cu_seqlens.tolist()
    order = []
    for rank in range(ranks):
        for a, b in pairwise(borders):
            chunk = (b - a) // (2 * ranks)
            for number in (rank, 2 * ranks - 1 - rank):
                order += range(a + number * chunk, a + (number + 1) * chunk)
    return torch.tensor(order, dtype=torch.int64)


def thd_sequence_order_to_cp_rank_order(x, cu_seqlens, ranks, total):
    """Bring whole documents in the order of ranks."""
    return x.index_select(0, _rank_order(cu_seqlens, ranks))


def thd_cp_rank_order_to_sequence_order(x, cu_seqlens, ranks, total):
    """Undo `thd_sequence_order_to_cp_rank_order`."""
    return x.index_select(0, _rank_order(cu_seqlens, ranks).argsort())


def thd_copy_valid_tokens_from_per_split_to_rank_local(out, out_step, offsets, cu_seqlens):
    """Copy each document's tokens of one step to their places on the rank."""
    starts = offsets.tolist()
    for start, length in zip(starts, cu_seqlens.diff().tolist(), strict=False):
        out[start : start + length] = out_step[start : start + length]


FUNCTIONS = (
    fused_attn_fwd,
    fused_attn_bwd,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_out_correction,
    thd_grad_correction,
    thd_sequence_order_to_cp_rank_order,
    thd_cp_rank_order_to_sequence_order,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
)


def device(capability: tuple[int, int]) -> SimpleNamespace:
    """Properties of an invented device, for ``torch.cuda.get_device_properties``."""
    return SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
