"""The largest logit of every head, against a mask written out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_anchor.attention import max_logits as module
from megatron_anchor.attention.max_logits import WatchedKernel, max_logits
from megatron_anchor.attention.runs import Runs, document_runs
from megatron_anchor.training import logit_rules
from megatron_anchor.windows import Window

CPU = torch.device("cpu")
LENGTHS = np.array([1, 2, 7, 30, 13, 4])
H, G, D = 4, 2, 8


def drawn(rows, heads, seed):
    return torch.randn(rows, heads, D, generator=torch.Generator().manual_seed(seed))


def written_out(q_THD, k_KGD, runs, scale):
    """Every pair of query and key in a loop, in float64."""
    most = torch.full((H,), -torch.inf, dtype=torch.float64)
    q_first = k_first = 0
    for queries, keys, begin in zip(runs.q_lengths, runs.k_lengths, runs.q_begins, strict=True):
        places = list(range(begin + queries - keys, begin + queries))
        if runs.window is not None and runs.window.keeps_anchor and places[0] > 0:
            places[0] = 0
        for i in range(queries):
            for j, place in enumerate(places):
                behind = begin + i - place
                near = runs.window is None or behind < runs.window.size
                kept = runs.window is not None and runs.window.keeps_anchor and place == 0
                if behind >= 0 and (near or kept):
                    for h in range(H):
                        q, k = q_THD[q_first + i, h], k_KGD[k_first + j, h // (H // G)]
                        most[h] = max(most[h], float(q.double() @ k.double()) * scale)
        q_first, k_first = q_first + queries, k_first + keys
    return most


@pytest.mark.parametrize("tile", [3, 8, 512])
@pytest.mark.parametrize("window", [None, Window(size=5), Window(size=5, keeps_anchor=True)])
def test_it_is_the_largest_of_what_queries_see(window, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    runs = document_runs(LENGTHS, device=CPU, window=window)
    q, k = drawn(LENGTHS.sum(), H, 0), drawn(LENGTHS.sum(), G, 1)
    found = max_logits(q, k, runs=runs, scale=0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), written_out(q, k, runs, 0.5), rtol=1e-6, atol=0)
    # What nobody sees has no say: a huge key at a document's end, to all but its own query.
    q[:, :, 0] = 1.0
    k[2, :, 0] = 1e4  # the last of the second document
    q[2] = 0.0
    found = max_logits(q, k, runs=runs, scale=0.5)
    assert found.max() < 100


def test_runs_that_begin_inside_a_document_see_the_keys_before_them(monkeypatch):
    monkeypatch.setattr(module, "TILE", 4)
    runs = Runs(
        q_lengths=np.array([3, 6]),
        k_lengths=np.array([9, 6]),
        q_begins=np.array([6, 0]),
        device=CPU,
    )
    q, k = drawn(9, H, 2), drawn(15, G, 3)
    expected = written_out(q, k, runs, 1.0)
    torch.testing.assert_close(
        max_logits(q, k, runs=runs, scale=1.0).double(), expected, rtol=1e-6, atol=0
    )


def test_a_watched_kernel_gives_what_the_kernel_gives():
    runs = document_runs(LENGTHS, device=CPU)
    q, k = drawn(LENGTHS.sum(), H, 0), drawn(LENGTHS.sum(), G, 1)
    told = []
    kernel = WatchedKernel(lambda q, k, v, **how: q + how["dropout"], told.append)
    out = kernel(q, k, k, runs=runs, scale=0.5, dropout=1.0, sink_H=None)
    assert torch.equal(out, q + 1.0)
    assert torch.equal(told[0], max_logits(q, k, runs=runs, scale=0.5))


def namespace(**changed):
    usual = {"qk_clip": True, "log_max_attention_logit": False, "bf16": True, "fp16": False}
    usual |= {"context_parallel_size": 1, "qk_clip_alpha": 0.5, "qk_clip_threshold": 100.0}
    return SimpleNamespace(**(usual | changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bf16": False}, "--qk-clip: Megatron finds the layers of --bf16 and --fp16 models only"),
        ({"qk_clip_alpha": 1.0}, "--qk-clip-alpha 1.0"),
        ({"qk_clip_threshold": 0.0}, "--qk-clip-threshold 0.0"),
    ],
)
def test_what_cannot_be_clipped_is_refused(changed, reason):
    assert list(logit_rules.refusals(namespace())) == []
    [said] = logit_rules.refusals(namespace(**changed))
    assert said.startswith(reason)
    assert list(logit_rules.refusals(namespace(qk_clip=False, **changed))) == []
