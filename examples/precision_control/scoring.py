"""Scores of a model in training: loss on held-out text, and retrieval by distance.

Every held-out document stands alone behind the anchor, as the first document of a sample does in
training, in the model's own dtype, through the attention layers that it was trained with.

Legend: B documents of a batch, S slots (anchor and tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import held_out_documents
from megatron.core.utils import unwrap_model
from task import RetrievalDocument, score_answers
from torch import Tensor

from megatron_anchor.attention.packed import pack_micro_batch

TRAINED_LENGTHS, LONGER = (24, 40, 64), (128, 256)
"""Tokens of the held-out documents: as long as in training, and longer."""

SHIFT = 65536
"""Added to every position id, the anchor's included: exact RoPE would not notice."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a trained model does on held-out documents."""

    text_loss: float
    """Nats a token on plain text of trained lengths."""
    text_loss_longer: float
    """The same on texts longer than trained."""
    answers: list[tuple[int, bool]]
    """(distance, right) of every question."""
    shift_loss: float
    """Mean absolute change of a token's loss when all positions move by SHIFT."""
    shift_answers: list[tuple[int, bool]]
    """The answers at moved positions."""


@torch.no_grad()
def score_model(
    model: Any, folder: Path, *, anchor: int, anchor_position: int, documents: int
) -> Scores:
    """Score a model on `documents` documents of every length and kind.

    Args:
        model: Megatron's (wrapped) GPTModel in evaluation mode.
        folder: that `corpus.make_corpus` wrote.
        anchor: token id.
        anchor_position: its position id; the tokens behind it have 1, 2, 3, ...
        documents: number.
    """
    losses: dict[int, list[Tensor]] = {}
    answers: dict[int, list[tuple[int, bool]]] = {0: [], SHIFT: []}
    for length in TRAINED_LENGTHS + LONGER:
        tasks, plain = held_out_documents(folder, length=length, count=documents)
        for shift in (0, SHIFT):
            positions = np.arange(length + 1)
            positions[0] = anchor_position
            run = _Run(model, anchor=anchor, positions=torch.from_numpy(positions + shift))
            losses.setdefault(shift, []).append(run.losses(plain))
            answers[shift] += run.answers(tasks)
    flat = {shift: torch.cat([x.flatten() for x in found]) for shift, found in losses.items()}
    longer = torch.cat([x.flatten() for x in losses[0][len(TRAINED_LENGTHS) :]])
    trained = torch.cat([x.flatten() for x in losses[0][: len(TRAINED_LENGTHS)]])
    return Scores(
        text_loss=float(trained.mean()),
        text_loss_longer=float(longer.mean()),
        answers=answers[0],
        shift_loss=float((flat[SHIFT] - flat[0]).abs().mean()),
        shift_answers=answers[SHIFT],
    )


@dataclass(frozen=True)
class _Run:
    """Documents of one length through the model, at given positions [S]."""

    model: Any
    anchor: int
    positions: Tensor

    def losses(self, texts: list[np.ndarray]) -> Tensor:
        """[documents, S - 1] nats of every token."""
        rows = []
        for logits_BSV, tokens_BS in self._logits(texts):
            logits, labels = logits_BSV[:, :-1].transpose(1, 2), tokens_BS[:, 1:]
            rows.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
        return torch.cat(rows)

    def answers(self, tasks: list[RetrievalDocument]) -> list[tuple[int, bool]]:
        """Judge all questions."""
        found = self._logits([task.tokens for task in tasks])
        predicted = [logits_BSV.argmax(-1)[:, 1:] for logits_BSV, _ in found]
        return score_answers(tasks, list(torch.cat(predicted).numpy()))

    def _logits(self, documents: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor]]:
        S = len(self.positions)
        for begin in range(0, len(documents), max(1, 2048 // S)):
            rows = np.stack(documents[begin : begin + max(1, 2048 // S)])
            tokens_BS = torch.from_numpy(np.insert(rows, 0, self.anchor, axis=1))
            B = len(tokens_BS)
            packed = pack_micro_batch(
                self.positions.expand(B, S), torch.tensor([[0, S]] * B), seq_length=S
            )
            logits_BSV = self.model(
                tokens_BS, packed.position_ids_Bs, None, packed_seq_params=packed
            )
            yield logits_BSV.float(), tokens_BS


def scoring_model(model: list[Any]) -> Any:
    """The one model chunk that Megatron's loop hands over, unwrapped."""
    (chunk,) = model
    return unwrap_model(chunk)
