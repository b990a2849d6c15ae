"""Megatron's router of experts, with statistics that do not know how the samples are packed.

Every copy of the anchor has the anchor's hidden state, so it goes to the anchor's experts and the
model's output is that of the form with one anchor. The router's losses and counts are sums over
tokens, though, and there copies and padding must not be counted. With p the scores, E experts, k
chosen per token, n counted slots and N_i of them sent to expert i, each over the whole micro-batch
or sample (all tensor- and context-parallel ranks):

    balance loss      coefficient x E x sum over i of N_i / (n k) x sum over slots of p_i / n
      aux_loss        n and N_i of the micro-batch
      seq_aux_loss    of each sample; the mean over the samples
      global_aux_loss N_i / (n k) of all micro-batches and data-parallel ranks so far
    z-loss            coefficient x mean over the n slots of logsumexp(logits)^2
    expert bias       moves by N_i of the global batch

With --calculate-per-token-loss Megatron divides every gradient by the number of targets of the
global batch, so each of these losses is multiplied by the T targets of what it is taken over (of
the sample for seq_aux_loss): a mean in which a micro-batch weighs as much as in the main loss.

Legend: s slots of this rank, B samples, E experts, R = s x B rows (slot after slot).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import sinkhorn
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def unsupported_reasons(settings: Any) -> Iterator[str]:
    """Say which settings of a model with experts would count copies of the anchor and padding.

    Args:
        settings: Megatron's arguments or its TransformerConfig; both have these names.
    """
    kinds = settings.moe_router_load_balancing_type
    if "quantile_balancing" in ([kinds] if isinstance(kinds, str) else kinds):
        yield (
            "--moe-router-load-balancing-type quantile_balancing: its quantiles would count "
            "padding and copies of the anchor as tokens; use --moe-router-enable-expert-bias with "
            "--moe-router-score-function sigmoid, or an auxiliary loss"
        )
    if settings.mlp_chunks_for_training > 1:
        yield (
            f"--mlp-chunks-for-training {settings.mlp_chunks_for_training}: Megatron does not tell "
            "the router of a chunk which slots are padding or copies of the anchor; leave it out "
            "for a model with experts"
        )


class _Counted(NamedTuple):
    """What `RouterMask` carried."""

    counted_R: Tensor
    tokens_B: Tensor
    targets_B: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.tokens_B.sum().clamp(min=1)

    @property
    def targets(self) -> Tensor:
        return self.targets_B.sum()


class AnchorRouter(TopKRouter):
    """Top-k router whose losses and counts take the slots that `RouterSlots` counts.

    Raises:
        ValueError: for settings that cannot be right (`unsupported_reasons`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons := list(unsupported_reasons(self.config)):
            raise ValueError("\n".join(reasons))
        self._now: _Counted | None = None
        self._next: Tensor | None = None

    def count_next(self, table: Tensor | None) -> None:
        """Give the table of a `RouterMask` to the next call that comes without one."""
        self._next = table

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route every slot; let the statistics see the counted ones.

        Args:
            logits: [s, B, E].
            padding_mask: int64 [s + 2, B], the table of a `RouterMask`.

        Returns:
            Weights [R, E] and bool [R, E], the experts of each slot.

        Raises:
            ValueError: without the table, in training with any statistic.
        """
        if padding_mask is None:
            padding_mask, self._next = self._next, None
        if padding_mask is None:
            if self.training and torch.is_grad_enabled() and self._has_statistics():
                raise ValueError(
                    "the router of a model with experts needs to know which slots are tokens: "
                    "pass pack_micro_batch(..., router=router_slots(sample['router_mask'], "
                    "sample['loss_mask'])) of megatron_anchor.attention"
                )
            return super().routing(logits)
        counted_sB, (tokens_B, targets_B) = padding_mask[:-2] != 0, padding_mask[-2:]
        self._now = _Counted(counted_sB.reshape(-1), tokens_B, targets_B)
        try:
            return super().routing(logits, ~counted_sB)
        finally:
            self._now = None

    def _has_statistics(self) -> bool:
        return (
            self.is_aux_loss_enabled()
            or bool(self.config.moe_z_loss_coeff)
            or self.enable_expert_bias
            or self.routing_type == "sinkhorn"
        )

    def _apply_aux_loss(
        self, probs: Tensor, scores_RE: Tensor, chosen_RE: Tensor, **_: Any
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        assert self._now is not None
        counts_E = _total(chosen_RE.sum(0), self.tp_cp_group)
        shares_E = counts_E / (self._now.tokens * self.topk)
        loss = self._balance(shares_E, scores_RE.sum(0), self._now.tokens)
        return self._add(probs, loss, coefficient, "load_balancing_loss", self._now.targets)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_RE: Tensor,
        chosen_RE: Tensor,
        seq_length: int,
        bsz: int,
        **_: Any,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        assert self._now is not None
        by_sample = (seq_length, bsz, -1)
        tokens_B1 = self._now.tokens_B.clamp(min=1)[:, None]
        counts_BE = _total(chosen_RE.view(by_sample).sum(0), self.tp_cp_group)
        shares_BE = counts_BE / (tokens_B1 * self.topk)
        losses_B = self._balance(shares_BE, scores_RE.view(by_sample).sum(0), tokens_B1)
        targets = self._now.targets
        if self.calculate_per_token_loss:
            loss = (losses_B * self._now.targets_B / targets.clamp(min=1)).sum()
        else:
            loss = losses_B.mean()
        return self._add(probs, loss, coefficient, "seq_load_balancing_loss", targets)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_RE: Tensor, chosen_RE: Tensor, **_: Any
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        assert self._now is not None
        counts_E = _total(chosen_RE.sum(0), self.tp_dp_cp_group)
        self.global_tokens_per_expert += counts_E
        self.ga_steps += 1
        shares_E = self.global_tokens_per_expert / self.global_tokens_per_expert.sum().clamp(min=1)
        tokens = (counts_E.sum() / self.topk).clamp(min=1)
        loss = self._balance(shares_E, scores_RE.sum(0), tokens)
        return self._add(
            probs,
            loss,
            coefficient,
            "global_load_balancing_loss",
            self._now.targets,
            group=self.tp_dp_cp_group,
            needs_dp_avg=False,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach this rank's part of the z-loss to [R, E] logits."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled() or self._now is None:
            return logits
        squares_R = torch.logsumexp(logits.float(), dim=-1).square() * self._now.counted_R
        loss = squares_R.sum() / self._now.tokens
        return self._add(logits, loss, coefficient, "z_loss", self._now.targets)

    def _balance(self, shares_E: Tensor, sums_E: Tensor, tokens: Tensor) -> Tensor:
        """[...] balance loss of [..., E] shares of choices and sums of this rank's scores."""
        return self.num_experts * (shares_E * sums_E / tokens).sum(-1)

    def _add(
        self,
        activation: Tensor,
        loss: Tensor,
        coefficient: float,
        name: str,
        targets: Tensor,
        *,
        group: Any = None,
        needs_dp_avg: bool = True,
    ) -> Tensor:
        """Let Megatron attach and log this rank's part of a loss without its coefficient.

        Per token Megatron multiplies by its count and by the group's size; T is of the group.
        """
        return self.attach_and_log_load_balancing_loss(
            activation,
            coefficient,
            loss * coefficient,
            name,
            self.tp_cp_group if group is None else group,
            needs_dp_avg=needs_dp_avg,
            valid_token_count=targets / self.tp_cp_group.size(),
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Megatron 0.19 would combine [R, E] with [R], and 0.20 takes no [R, 1].
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Balance the counted slots of the whole micro-batch; copies then go where the anchor goes.

        Args:
            logits: [R, E].
        """
        if self._now is None or not self.training:
            return super().sinkhorn_load_balancing(logits)
        with torch.no_grad():
            weighted_RE = torch.exp(logits.float()) * self._sinkhorn_weights(logits.float())
            chosen_Rk = torch.topk(weighted_RE, k=self.topk, dim=1).indices
            map_RE = torch.zeros_like(weighted_RE, dtype=torch.bool).scatter(1, chosen_Rk, True)
        scores_RE = (
            torch.sigmoid(logits)
            if self.topk == 1
            else torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
        )
        return scores_RE * map_RE, map_RE

    def _sinkhorn_weights(self, logits_RE: Tensor) -> Tensor:
        """[E] factors of the experts in the balanced matrix, up to one constant."""
        assert self._now is not None
        group = self.tp_cp_group
        logits_RE, counted_R = _gathered(logits_RE, group), _gathered(self._now.counted_R, group)
        rows_RE = logits_RE[counted_R] if counted_R.any() else logits_RE
        return (sinkhorn(rows_RE) / torch.exp(rows_RE))[0]


def _total(counts: Tensor, group: Any) -> Tensor:
    """Sum counts over a group, float32; Megatron's own sum would work in place."""
    total = counts.float()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def _gathered(rows: Tensor, group: Any) -> Tensor:
    """The rows of all ranks of a group."""
    if group.size() == 1:
        return rows
    pieces = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(pieces, rows.contiguous(), group=group)
    return torch.cat(pieces)
