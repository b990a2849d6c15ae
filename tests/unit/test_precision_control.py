"""The pieces of examples/precision_control: task, scores, table, and its bfloat16 products."""

from __future__ import annotations

import json
import sys
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "precision_control"))
from bfloat16_on_cpu import exact_products
from report import Run, summarize, table
from task import (
    CHANCE,
    NAMES,
    TOKENS,
    VALUES,
    Vocabulary,
    chance_of_as_many,
    make_document,
    score_answers,
)

VOCABULARY = Vocabulary(first=2)
TEXT = 1000
"""Text tokens of these tests are from here on."""


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(0, 10**6))
def test_every_question_is_answered_by_its_fact_at_the_stated_distance(
    length: int, questions: int, scattered: bool, seed: int
) -> None:
    text = np.arange(TEXT, TEXT + length)
    document = make_document(
        np.random.default_rng(seed),
        text,
        vocabulary=VOCABULARY,
        questions=questions,
        scattered=scattered,
    )
    tokens = document.tokens.tolist()
    assert [t for t in tokens if t >= TEXT] == text.tolist()
    assert len(tokens) == length + NAMES + 2 * questions
    facts = [t for t in tokens if 2 <= t < 2 + NAMES * VALUES]
    value_of = {(t - 2) // VALUES: (t - 2) % VALUES for t in facts}
    assert len(facts) == len(value_of) == len(set(value_of.values())) == NAMES
    for place, distance in zip(document.questions, document.distances, strict=True):
        name = tokens[place] - VOCABULARY.question(0)
        value = value_of[name]
        assert tokens[place + 1] == VOCABULARY.answer(value)
        told = [p for p in range(place) if tokens[p] == VOCABULARY.fact(name, value)]
        told += [p + 1 for p in document.questions if p < place and tokens[p] == tokens[place]]
        assert distance == place - max(told) > 0
    if not scattered:
        assert document.questions[0] == length + NAMES


def test_right_answers_are_found_and_wrong_ones_are_not() -> None:
    random = np.random.default_rng(0)
    document = make_document(
        random, np.arange(TEXT, TEXT + 9), vocabulary=VOCABULARY, questions=3, scattered=False
    )
    expected = np.append(document.tokens[1:], 0)
    assert [ok for _, ok in score_answers([document], [expected])] == [True] * 3
    wrong = expected.copy()
    wrong[document.questions[1]] += 1
    assert [ok for _, ok in score_answers([document], [wrong])] == [True, False, True]
    distances = [distance for distance, _ in score_answers([document], [wrong])]
    assert distances == document.distances.tolist()


def test_ignoring_the_names_is_right_at_the_rate_of_chance() -> None:
    random = np.random.default_rng(1)
    right = total = 0
    for _ in range(800):
        document = make_document(
            random, np.empty(0, np.int64), vocabulary=VOCABULARY, questions=2, scattered=False
        )
        (guess,) = {VOCABULARY.answer((t - 2) % VALUES) for t in document.tokens[:1].tolist()}
        right += sum(document.tokens[document.questions + 1] == guess)
        total += 2
    assert chance_of_as_many(right, total) > 1e-3
    assert chance_of_as_many(total - right, total, chance=1 - CHANCE) > 1e-3


@pytest.mark.parametrize(("right", "of"), [(0, 7), (3, 7), (7, 7)])
def test_binomial_tail(right: int, of: int) -> None:
    exact = sum(comb(of, k) * CHANCE**k * (1 - CHANCE) ** (of - k) for k in range(right, of + 1))
    assert chance_of_as_many(right, of) == pytest.approx(exact)


def test_the_table_has_means_and_deviations_over_seeds() -> None:
    def run(seed: int, loss: float, answers: list[tuple[int, bool]]) -> Run:
        scores = {"text_loss": loss, "text_loss_longer": loss + 1, "answers": answers}
        return Run(arm="anchor", seed=seed, scores=scores | {"shift_loss": 0.01})

    runs = [run(1, 3.0, [(2, True), (40, False)]), run(2, 4.0, [(3, True), (41, True)])]
    summary = summarize(runs)["anchor"]
    assert str(summary["text loss"]) == "3.500 ± 0.707"
    assert str(summary["retrieval"]) == "0.750 ± 0.354"
    assert str(summary["1 to 15"]) == "1.000 ± 0.000"
    assert summary["64 to 127"] is None
    assert (summary["right"], summary["questions"]) == (3, 4)
    head, _, row = table({"anchor": summary}).splitlines()
    assert head.count("|") == row.count("|")
    assert "| 3.500 ± 0.707 |" in row
    assert "| - |" in row


def test_no_token_of_the_task_is_doubled() -> None:
    assert len(set(TOKENS)) == len(TOKENS) == NAMES * VALUES + NAMES + VALUES


def test_products_and_attention_are_as_near_to_the_truth_as_torchs_own_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_()

    a, b = draw(33, 64), draw(64, 17)
    q, k, v = (draw(2, 50, 16) for _ in range(3))
    upstream = torch.randn(2, 50, 16, generator=generator)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, dropout_p=0.0, scale=0.25)
        out.backward(upstream.to(dtype))
        return [torch.matmul(a.to(dtype), b.to(dtype)), out, *(leaf.grad for leaf in leaves)]

    truth, theirs = results(torch.float64), results(torch.bfloat16)
    with exact_products():
        ours = results(torch.bfloat16)
    for exact, own, reference in zip(truth, ours, theirs, strict=True):
        assert own.dtype == torch.bfloat16
        floor = (reference.double() - exact).norm()
        assert floor > 0
        assert (own.double() - exact).norm() < 1.5 * floor


def test_results_files_are_whole(tmp_path: Path) -> None:
    from report import write_report

    scores = {
        "text_loss": 3.0,
        "text_loss_longer": 3.0,
        "shift_loss": 0.0,
        "answers": [(2, True)],
        "steps": [[1, 5.0], [2, 4.0]],
    }
    text = write_report(tmp_path, [Run(arm="full", seed=1, scores=scores)])
    assert (tmp_path / "results.md").read_text() == text + "\n"
    assert json.loads((tmp_path / "results.json").read_text())["summary"]["full"]["seeds"] == 1
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "results.json",
        "results.md",
        "results.png",
    ]
