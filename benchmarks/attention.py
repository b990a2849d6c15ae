"""Attention over the documents of one packed sample on the CPU, next to what torch offers for it.

Ours is the kernel `sdpa` (one call a document). Peers, on the same tensors in turns:

- SDPA with the causal flag: full attention, what packing without masks costs;
- SDPA with the documents' S x S mask: the same result, the plain way;
- the same two for one long document under a sliding window (--windows), whose band our kernel
  computes in chunks;
- FlexAttention, compiled, with a block mask of the documents: the same result; it has no backward
  pass on a CPU, so this row is forward only. It needs a C++ compiler.

Results that should be the same are compared before anything is measured. On CUDA devices take
benchmarks/gpu_attention.py.

    python benchmarks/attention.py --seq-lengths 4096 8192
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_lengths
import numpy as np
import torch
from side_by_side import Comparison, Findings, at_least_one, compare
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_anchor.attention.backends import sdpa
from megatron_anchor.attention.block_mask import runs_block_mask
from megatron_anchor.attention.packed import AnchorPackedSeqParams, pack_micro_batch
from megatron_anchor.attention.runs import document_runs
from megatron_anchor.windows import Window

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
SCALE = HEAD_DIM**-0.5


class Sample:
    """Tensors and documents of one sample; its methods are the ways to attend.

    Legend: S slots, H query heads, G key/value heads, D head dim.
    """

    def __init__(self, seq_length: int) -> None:
        lengths = gpu_lengths.slimpajama_like().pack(seq_length)
        cu_seqlens_1N = torch.tensor([[0, *lengths]]).cumsum(1).to(torch.int32)
        generator = torch.Generator().manual_seed(seq_length)
        self.documents = len(lengths)
        self.slots = seq_length
        self.cu_seqlens = cu_seqlens_1N[0]
        self.packed: AnchorPackedSeqParams = pack_micro_batch(
            torch.arange(seq_length)[None], cu_seqlens_1N, seq_length=seq_length
        )
        self.q_SHD, self.k_SGD, self.v_SGD = (
            torch.randn(seq_length, heads, HEAD_DIM, generator=generator, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.upstream_SHD = torch.randn(self.q_SHD.shape, generator=generator)
        self.block_mask = runs_block_mask(self.packed.runs())

    def ours(self) -> Tensor:
        """One call a document."""
        return sdpa.attend(
            self.q_SHD, self.k_SGD, self.v_SGD, runs=self.packed.runs(), scale=SCALE, dropout=0.0
        )

    def full(self) -> Tensor:
        """Causal over the whole sample."""
        return self._sdpa(is_causal=True)

    def masked(self) -> Tensor:
        """Build the mask, as every step has other documents, and attend."""
        places = torch.arange(self.slots)
        document = torch.searchsorted(self.cu_seqlens, places, right=True)
        mask_SS = (document[:, None] == document) & (places[:, None] >= places)
        return self._sdpa(attn_mask=mask_SS)

    def flex(self, function: Callable[..., Tensor]) -> Tensor:
        """Attend with the documents' block mask, made beforehand."""
        tensors = (self.q_SHD, self.k_SGD, self.v_SGD)
        q, k, v = (x.detach().transpose(0, 1)[None] for x in tensors)
        out = function(q, k, v, block_mask=self.block_mask, scale=SCALE, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _sdpa(self, **mask: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q_SHD, self.k_SGD, self.v_SGD))
        out = scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True, **mask)
        return out[0].transpose(0, 1)

    def forward_and_backward(self, attend: Callable[[], Tensor]) -> None:
        """One step of a way."""
        attend().backward(self.upstream_SHD)
        self.q_SHD.grad = self.k_SGD.grad = self.v_SGD.grad = None


def benchmark(seq_length: int, repeats: int) -> list[Comparison]:
    """All peers at one length."""
    sample = Sample(seq_length)
    name = f"S = {seq_length}, {sample.documents} documents"
    torch.testing.assert_close(sample.ours(), sample.masked(), atol=1e-4, rtol=1e-4)
    rows = [
        compare(
            f"attention forward and backward, {name}",
            lambda: sample.forward_and_backward(sample.ours),
            lambda way=way: sample.forward_and_backward(way),
            peer=peer,
            repeats=repeats,
            note=note,
        )
        for way, peer, note in (
            (sample.full, "SDPA, full causal attention", "does more work"),
            (sample.masked, "SDPA with an S x S mask", "same result"),
        )
    ]
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        with torch.no_grad():
            rows.append(against_flex(sample, name, repeats))
    else:
        print("without FlexAttention: torch.compile finds no C++ compiler")
    return rows


class Band:
    """One document under a sliding window; its methods are the ways to attend."""

    def __init__(self, seq_length: int, window: int) -> None:
        self.window = window
        self.runs = document_runs(
            np.array([seq_length]), device=torch.device("cpu"), window=Window(size=window)
        )
        generator = torch.Generator().manual_seed(seq_length)
        self.q_SHD, self.k_SHD, self.v_SHD, self.upstream_SHD = (
            torch.randn(seq_length, HEADS, HEAD_DIM, generator=generator) for _ in range(4)
        )
        for x in (self.q_SHD, self.k_SHD, self.v_SHD):
            x.requires_grad_()
        place_S = torch.arange(seq_length)
        behind_SS = place_S[:, None] - place_S
        self.mask_SS = (behind_SS >= 0) & (behind_SS < window)

    def ours(self) -> Tensor:
        """The band in chunks."""
        return sdpa.attend(
            self.q_SHD, self.k_SHD, self.v_SHD, runs=self.runs, scale=SCALE, dropout=0.0
        )

    def masked(self) -> Tensor:
        """A mask of all pairs."""
        return self._sdpa(attn_mask=self.mask_SS)

    def full(self) -> Tensor:
        """No window."""
        return self._sdpa(is_causal=True)

    def forward_and_backward(self, attend: Callable[[], Tensor]) -> None:
        """One step of a way."""
        attend().backward(self.upstream_SHD)
        self.q_SHD.grad = self.k_SHD.grad = self.v_SHD.grad = None

    def _sdpa(self, **mask: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q_SHD, self.k_SHD, self.v_SHD))
        return scaled_dot_product_attention(q, k, v, scale=SCALE, **mask)[0].transpose(0, 1)


def benchmark_window(seq_length: int, window: int, repeats: int) -> list[Comparison]:
    """A window's band against a mask of all pairs and against no window."""
    band = Band(seq_length, window)
    torch.testing.assert_close(band.ours(), band.masked(), atol=1e-4, rtol=1e-4)
    return [
        compare(
            f"window of {window}, forward and backward, one document of {seq_length}",
            lambda: band.forward_and_backward(band.ours),
            lambda way=way: band.forward_and_backward(way),
            peer=peer,
            repeats=repeats,
            note=note,
        )
        for way, peer, note in (
            (band.masked, "SDPA with an S x S mask", "same result"),
            (band.full, "SDPA, full causal attention", "does more work"),
        )
    ]


def against_flex(sample: Sample, name: str, repeats: int) -> Comparison:
    """Forward only."""
    from torch.nn.attention.flex_attention import flex_attention

    # Static shapes: with dynamic ones (from the second length on) torch 2.13 writes C++ that fails.
    compiled = torch.compile(flex_attention, dynamic=False)
    torch.testing.assert_close(sample.ours(), sample.flex(compiled), atol=1e-4, rtol=1e-4)
    return compare(
        f"attention forward, {name}",
        sample.ours,
        lambda: sample.flex(compiled),
        peer="FlexAttention, compiled",
        repeats=repeats,
        note="same result",
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--windows", type=at_least_one, nargs="*", default=[128, 1024])
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for s in options.seq_lengths for row in benchmark(s, options.repeats)]
    longest = max(options.seq_lengths)
    for window in options.windows:
        rows += benchmark_window(longest, min(window, longest), options.repeats)
    findings = Findings(comparisons=rows)
    print(findings.table())
    if options.json:
        findings.write(options.json)


if __name__ == "__main__":
    main()
