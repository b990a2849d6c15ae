"""The first token's logit at distances that no text need have, and its error by frequency.

Real queries and keys of every layer (before rotation, under the reference shift) are put at any
position: row i has the query of text token i, and past the text's end its tokens 1, 2, ... again.
The first token's key stays at 0. So D_logit (equation 5) is followed up to 131072 rows without
running a model of that length, and only the rotation and the product are measured.

Rows are drawn from each doubling of the distance, at most `SAMPLES` of them without replacement (at
random, since evenly spaced ones would meet the dyadic pattern of rounding), and each stands for its
part of the doubling.

A logit is a sum over RoPE's frequencies, q[f] k[f] + q[f + F] k[f + F] of the rotated vectors; the
differences of these terms say which dimensions carry the error.

Legend: O doublings, N sampled rows, F = D / 2 frequencies, H heads, G key/value heads, S tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.precision.arms import Arm

FIRST_DOUBLING = 64
SAMPLES = 512
PAIRS = 512


class FirstTokenProbe:
    """Collects over layers and texts; every call of `add` is one layer of one text."""

    def __init__(
        self,
        arm: Arm,
        inv_freq_F: Tensor,
        *,
        attention_factor: float,
        shifts: tuple[int, int],
        reach: int,
        seed: int = 0,
    ) -> None:
        """Choose the rows.

        Args:
            arm: how rotation and logits are rounded.
            inv_freq_F: inverse frequencies.
            attention_factor: scale of cos and sin.
            shifts: shift1 and shift2.
            reach: rows at most, a power of two of at least 64.
            seed: of the drawn rows.
        """
        self.arm, self.inv_freq_F, self.factor, self.shifts = (
            arm,
            inv_freq_F,
            attention_factor,
            shifts,
        )
        self.random = np.random.default_rng(seed)
        edges = [0, *(FIRST_DOUBLING << n for n in range(reach.bit_length() - 6))]
        assert edges[-1] == reach, reach
        self.lengths = np.array(edges[1:])
        self.sizes_O = np.diff(edges)
        drawn = [
            np.sort(self.random.choice(int(size), min(int(size), SAMPLES), replace=False)) + begin
            for begin, size in zip(edges, self.sizes_O, strict=False)
        ]
        self.rows_N = torch.from_numpy(np.concatenate(drawn))
        self.doubling_N = np.repeat(np.arange(len(drawn)), [len(part) for part in drawn])
        doublings, frequencies = len(drawn), len(inv_freq_F)
        self._logit_O = np.zeros(doublings)
        self._bands_OF = np.zeros((doublings, frequencies))
        self._pairs_F = np.zeros(frequencies)
        self._layers = self._logits = 0

    def add(self, q_HSD: Tensor, k_GSD: Tensor, *, scale: float) -> None:
        """Take a layer's queries and keys, not rotated."""
        length = q_HSD.shape[1]
        source_N = torch.where(
            self.rows_N < length, self.rows_N, 1 + (self.rows_N - 1) % max(length - 1, 1)
        ).to(q_HSD.device)
        zero = torch.zeros(1, dtype=torch.int64)
        bands, logits = self._difference(
            q_HSD[:, source_N], k_GSD[:, :1], self.rows_N, zero, scale=scale
        )
        counts_O = np.bincount(self.doubling_N)
        starts_O = np.concatenate(([0], np.cumsum(counts_O)[:-1]))
        self._logit_O += np.add.reduceat(logits, starts_O) / counts_O
        self._bands_OF += np.add.reduceat(bands, starts_O) / counts_O[:, None]
        row = self.random.integers(2, max(length, 3), PAIRS)
        key = 1 + (self.random.random(PAIRS) * (row - 1)).astype(np.int64)
        rows, keys = torch.from_numpy(row), torch.from_numpy(key)
        if length > 2:
            pairs, _ = self._difference(
                q_HSD[:, rows.to(q_HSD.device)],
                k_GSD[:, keys.to(k_GSD.device)],
                rows,
                keys,
                scale=scale,
            )
            self._pairs_F += pairs.mean(0)
        self._layers += 1
        self._logits += q_HSD.shape[0]

    def _difference(
        self, q_HND: Tensor, k_GND: Tensor, rows_N: Tensor, keys_N: Tensor, *, scale: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Absolute differences summed over heads: of the terms [N, F] and the logits [N]."""
        terms, logits = [], []
        for shift in self.shifts:
            q, k = (
                self.arm.rotated(
                    x[None],
                    (at + shift).to(x.device)[None],
                    self.inv_freq_F,
                    attention_factor=self.factor,
                )[0].float()
                for x, at in ((q_HND, rows_N), (k_GND, keys_N))
            )
            k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
            product_HND = q * k
            logit = self.arm.rounded(self.arm.rounded(product_HND.sum(-1)) * scale)
            first, second = product_HND.chunk(2, dim=-1)
            terms.append((first + second) * scale)
            logits.append(logit)
        band = (terms[0] - terms[1]).abs().sum(0, dtype=torch.float64)
        logit = (logits[0] - logits[1]).abs().sum(0, dtype=torch.float64)
        return band.cpu().numpy(), logit.cpu().numpy()

    def first_logit(self, *, texts: int) -> np.ndarray:
        """D_logit (sum over layers and heads) at each of `lengths`, mean over texts."""
        so_far = np.cumsum(self._logit_O * self.sizes_O)
        return so_far / self.lengths / texts

    def bands(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean error that a frequency brings into a logit.

        Returns:
            [O, F] of the first key, by doubling of the distance, and [F] of other keys at random.
        """
        return self._bands_OF / self._logits, self._pairs_F / self._logits
