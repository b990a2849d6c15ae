"""Greedy answers of a Hugging Face model, in batches.

Legend: B samples of a batch, S tokens of the longest prompt in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.tasks import Sample
from megatron_anchor.evaluation.tokens import PromptTokenizer


def not_finite(place: str) -> str:
    """Words for logits that are NaN or Inf: a score of them would look like a weak model's."""
    return (
        f"the model's logits are NaN or Inf {place}: its weights are damaged, or too large for "
        "their dtype. The conversion commands name such weights"
    )


def _require_numbers(ids_BS: Any, logits_BV: Any) -> Any:
    """Pass logits on; greedy search would take the id 0 of NaN."""
    if bool(logits_BV.isnan().any()) or bool(logits_BV.isposinf().any()):
        raise UserError(not_finite(f"after {ids_BS.shape[1]} tokens of a prompt and its answer"))
    return logits_BV


class Generator:
    """A model that answers prompts; a prompt's answer does not hang on its neighbours."""

    def __init__(self, model: Any, tokenizer: PromptTokenizer) -> None:
        """Take a model over: its own sampling settings are put off, its end tokens kept."""
        from transformers import GenerationConfig

        self.model, self.tokenizer = model, tokenizer
        own = getattr(model, "generation_config", None)
        ends = getattr(own, "eos_token_id", None)
        if ends is None:
            ends = tokenizer.eos_id
        model.generation_config = GenerationConfig(
            do_sample=False, num_beams=1, eos_token_id=ends, pad_token_id=tokenizer.pad_id
        )
        self.vocabulary = model.get_input_embeddings().weight.shape[0]

    def answers(self, samples: Sequence[Sample]) -> list[str]:
        """Generate for one batch; all samples have the same room for the answer.

        Prompts are filled up on the left, masked there, and keep the positions that they have
        alone.

        Raises:
            UserError: if the model and the tokenizer do not belong together, or the memory
                does not suffice.
        """
        import torch

        rows = [sample.ids for sample in samples]
        largest = max(max(row) for row in rows)
        if largest >= self.vocabulary:
            raise UserError(
                f"the tokenizer gives the id {largest}, but the model has {self.vocabulary} "
                "embeddings: give the model's own tokenizer with --tokenizer"
            )
        longest = max(map(len, rows))
        pad = min(self.tokenizer.pad_id, self.vocabulary - 1)
        ids_BS = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask_BS = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        device = self.model.device
        try:
            with torch.inference_mode():
                out = self.model.generate(
                    ids_BS.to(device),
                    attention_mask=mask_BS.to(device),
                    max_new_tokens=samples[0].new_tokens,
                    logits_processor=[_require_numbers],
                )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory with {len(rows)} prompts of {longest} tokens: give a smaller "
                f"--batch-size, or shorter --seq-lengths ({error})"
            ) from error
        return [self.tokenizer.decode(row) for row in out[:, longest:].tolist()]
