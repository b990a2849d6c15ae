"""Megatron's forward step and loss for packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from torch import Tensor

from megatron_anchor.context_parallel.split import CONTEXT_IMBALANCE
from megatron_anchor.packing.balance import IMBALANCE_FIGURES
from megatron_anchor.packing.length_schedule import LENGTH_LIMIT
from megatron_anchor.packing.statistics import attention_work_share
from megatron_anchor.training import bad_batch, target_units
from megatron_anchor.training.arguments import model_windows
from megatron_anchor.training.batch import FIGURES, MicroBatch, get_batch
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.windows import FULL, LayerWindows

stimer = StragglerDetector()

SPIKE = 10
"""A loss larger than this multiple of the largest one so far is reported (--check-for-spiky-loss);
Megatron's own programs use the same factor."""


IMBALANCES = {
    IMBALANCE_FIGURES[0]: "work imbalance in order",
    IMBALANCE_FIGURES[1]: "work imbalance",
    CONTEXT_IMBALANCE: "context work imbalance",
}
"""Figures in millionths, and their names in the log."""


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run one micro-batch through this rank's part of the model.

    Args:
        data_iterator: see `get_batch`.
        model: Megatron's (wrapped) GPTModel.
        return_schedule_plan: run nothing yet; Megatron's schedule for
            --overlap-moe-expert-parallel-comm asks for it.

    Returns:
        The model's output ([B, s] losses on the last pipeline stage), or the plan to compute it,
        and the function that turns it into Megatron's (loss, token count, report).
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(
            data_iterator,
            split=context_parallel(args).split,
            rank=mpu.get_context_parallel_rank(),
            device=torch.empty(0, device="cuda").device,
            has_experts=bool(args.num_experts),
            prediction_depths=_prediction_depths(args),
            figures=_figures(args, training=model.training),
            units=target_units.chosen(),
            pad_documents_to=args.pad_documents_to,
        )
    bad_batch.remember(batch.origin_B2, training=model.training)
    # Megatron's TFLOP/s figure; each chunk of an interleaved pipeline sees the same batch.
    if model.training and not get_attr_wrapped_model(model, "vp_stage"):
        update_seqlen_stats_from_cu_seqlens(batch.packed.cu_seqlens_q)
    timers("batch-generator").stop()
    with stimer:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch.tokens,
            batch.packed.position_ids_Bs,
            None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed,
        )
    return output, partial(loss_function, batch=batch, report_packing=model.training)


def _prediction_depths(args: Any) -> int:
    """Depths of multi-token prediction, whose layers are on the last pipeline stage."""
    return (args.mtp_num_layers or 0) if mpu.is_pipeline_last_stage() else 0


def _figures(args: Any, *, training: bool) -> tuple[str, ...]:
    figures: tuple[str, ...] = FIGURES
    if training and args.balance_attention_work:  # only training samples are balanced
        figures += IMBALANCE_FIGURES
    if training and args.document_length_schedule:
        figures += (LENGTH_LIMIT,)
    if context_parallel(args).split.gathers:
        figures += (CONTEXT_IMBALANCE,)
    return figures


def loss_function(
    losses_Bs: Tensor, *, batch: MicroBatch, report_packing: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of the targets, each by its weight.

    With --calculate-per-token-loss Megatron divides the summed gradient by the number of targets
    of the whole global batch, and local sums and counts are what it needs. Without it, each
    micro-batch is divided by its own number of targets; the pieces of one sample on different
    context-parallel ranks hold different numbers of them, so the count is that of the whole sample
    and the loss is scaled by the context-parallel size, which Megatron's gradient average divides
    out again.

    Megatron counts targets in integers: weights are in units that make their sums nearly whole
    (`target_units`), and the loss is in the same units.

    Args:
        losses_Bs: [B, s] cross entropy of every slot.
        batch: its loss mask and packing figures are read, and what multi-token prediction found.
        report_packing: add the packing figures to the report (Megatron would print a perplexity
            for each of them during evaluation).

    Returns:
        Loss to differentiate, targets in units that it is divided by, and the report: pairs
        [sum, count] that Megatron adds up over micro-batches and data- and context-parallel ranks,
        logs and writes to TensorBoard.
    """
    args = get_args()
    loss = torch.sum(losses_Bs.float() * batch.loss_mask)
    weight = batch.loss_mask.sum()
    with bad_batch.judging(losses_Bs, batch.origin_B2):
        _check(loss, args)
    report = {"lm loss": _pair(loss, weight)}
    if target_units.weighed():
        counts = batch.loss_mask > 0
        report["lm loss unweighted"] = _pair((losses_Bs.float() * counts).sum(), counts.sum())
    if batch.packed.future is not None:
        report |= _report_depths(batch, args)
    if report_packing:
        windows = model_windows(args)
        report |= packing_report(batch, seq_length=args.seq_length, windows=windows)
    cp_size = mpu.get_context_parallel_world_size()
    if cp_size > 1 and not args.calculate_per_token_loss:
        dist.all_reduce(weight, group=mpu.get_context_parallel_group())
        loss = loss * cp_size
    return loss, weight.round().to(torch.int), report


def _pair(total: Tensor, count: Tensor) -> Tensor:
    """[sum, count] for the log, in which nothing by nothing is 0."""
    count = count.to(torch.float32)
    return torch.stack((total.detach().float(), count.clamp(min=torch.finfo(torch.float32).tiny)))


def _report_depths(batch: MicroBatch, args: Any) -> dict[str, Tensor]:
    """Check and report what multi-token prediction found, as [sum, count] pairs.

    Names are Megatron's; its values are means of the ranks' and micro-batches' means, these weigh
    every target alike. A batch of short documents may have none, whose loss is then said to be 0.
    """
    future, report = batch.packed.future, {}
    assert future is not None
    for number, (depth, found) in enumerate(zip(future.depths, future.found, strict=True), 1):
        total = found.losses_Bs.float().sum()
        targets = depth.loss_mask_Bs.sum()
        with bad_batch.judging(found.losses_Bs, batch.origin_B2):
            _check(total, args, what=f" of mtp_{number}", spikes=False)
        report[f"mtp_{number} loss"] = _pair(total, targets)
        if found.correct is not None:
            report[f"mtp_{number}_acceptance_rate"] = _pair(100 * found.correct, targets)
    return report


def packing_report(
    batch: MicroBatch, *, seq_length: int, windows: LayerWindows = FULL
) -> dict[str, Tensor]:
    """Give the packing figures of a micro-batch as [sum, count] pairs for Megatron's log.

    Args:
        batch: the micro-batch.
        seq_length: S.
        windows: of the model's layers.

    Returns:
        Documents per sample and how many of them are cut, share of padding slots, the share of full
        causal attention's work that documents and windows leave (pairs of query and key), and
        the largest rank's work over the mean: of data-parallel ranks where the batch is balanced,
        before and after, and of context-parallel parts where keys and values are gathered.
    """
    figures, packed = batch.figures, batch.packed
    samples = figures["num_documents"].numel()
    work = attention_work_share(
        packed.document_lengths, sequence_length=seq_length, windows=windows
    )
    # Sums of each sample's share, and not of its work: Megatron adds these up in float32.
    sums = {
        "documents per sample": figures["num_documents"].sum(),
        "cut documents per sample": figures["num_cut"].sum(),
        "padding share": figures["num_padding"].sum() / seq_length,
        "attention work": torch.full((), work, device=packed.device),
    }
    if LENGTH_LIMIT in figures:
        sums["document length limit"] = figures[LENGTH_LIMIT].sum()
    for name, log_name in IMBALANCES.items():
        if name in figures:
            sums[log_name] = figures[name].sum() / 1e6
    return {
        name: torch.stack((total.float(), total.new_tensor(samples).float()))
        for name, total in sums.items()
    }


def _check(loss: Tensor, args: Any, *, what: str = "", spikes: bool = True) -> None:
    """Stop on NaN and Inf, and report spikes, through Megatron's rerun machine."""
    machine = get_rerun_state_machine()
    checks = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, f"found NaN in local forward loss calculation{what}", True)]
        checks += [(torch.isinf, f"found Inf in local forward loss calculation{what}", True)]
    if args.check_for_spiky_loss and spikes:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks += [(spiky, "Spiky loss", False)]
    for rejection, message, fatal in checks:
        machine.validate_result(
            result=loss, rejection_func=rejection, message=message, tolerance=0.0, fatal=fatal
        )
