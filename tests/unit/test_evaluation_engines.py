"""Generation in batches, perplexity in blocks, and what is handed to lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.generation import Generator
from megatron_anchor.evaluation.harness import (
    LENGTHS,
    HarnessJob,
    check_harness,
    harness_names,
)
from megatron_anchor.evaluation.models import Placement, check_positions, load_model
from megatron_anchor.evaluation.perplexity import (
    Text,
    bucket_sums,
    read_texts,
    token_losses,
    windows,
)
from megatron_anchor.evaluation.tasks import TASKS, Sample
from megatron_anchor.evaluation.tokens import PromptTokenizer
from tests.evaluation_models import tiny_model

CPU = Placement("cpu", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, CPU), PromptTokenizer(folder)


def samples(tokenizer, lengths):
    """Prompts of random bytes."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(32, 127, (n,), generator=generator).tolist() for n in lengths]
    texts = ["".join(map(chr, row)) for row in rows]
    return [Sample("vt", 99, i, None, t, tokenizer.encode(t), ["x"]) for i, t in enumerate(texts)]


def test_an_answer_does_not_hang_on_its_neighbours_in_the_batch(loaded):
    model, tokenizer = loaded
    given = samples(tokenizer, [5, 40, 17, 60])
    generator = Generator(model, tokenizer)
    alone = [generator.answers([sample])[0] for sample in given]
    assert len(set(alone)) == len(alone)
    assert generator.answers(given) == alone
    assert generator.answers(given[::-1]) == alone[::-1]


def test_an_answer_is_the_greedy_one_and_as_long_as_the_task_allows(loaded):
    model, tokenizer = loaded
    [sample] = samples(tokenizer, [30])
    ids = list(sample.ids)
    with torch.inference_mode():
        for _ in range(TASKS["vt"].new_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 257:
                break
    said = Generator(model, tokenizer).answers([sample])[0]
    assert said == tokenizer.decode(ids[len(sample.ids) :])


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(loaded):
    model, tokenizer = loaded
    sample = Sample("vt", 99, 0, None, "", [1, 264], ["x"])
    with pytest.raises(UserError, match=r"id 264, but the model has 264 embeddings"):
        Generator(model, tokenizer).answers([sample])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_with_an_error_and_no_score(folder, value):
    model, tokenizer = load_model(folder, CPU), PromptTokenizer(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[70] = value
    [sample] = samples(tokenizer, [40])
    ids = [*sample.ids[:10], 70, *sample.ids[10:]]
    with pytest.raises(UserError, match=r"logits are NaN or Inf at token \d+ of a text"):
        token_losses(model, ids)
    broken = Sample("vt", 99, 0, None, "", ids, ["x"])
    with pytest.raises(UserError, match=r"logits are NaN or Inf after \d+ tokens"):
        Generator(model, tokenizer).answers([broken])


@pytest.mark.parametrize("block", [7, 64, 512])
def test_losses_in_blocks_equal_one_forward_pass(loaded, block):
    model, tokenizer = loaded
    ids = samples(tokenizer, [100])[0].ids
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1].double()
    expected = -logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    found = token_losses(model, ids, block=block)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-5)
    whole = model(tokens, labels=tokens).loss.item()
    assert found.mean() == pytest.approx(whole, abs=1e-5)


def test_logits_exist_for_one_block_only(loaded):
    model, tokenizer = loaded
    ids = samples(tokenizer, [300])[0].ids
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    token_losses(model, ids, block=50)
    handle.remove()
    assert seen == [50] * 6


def test_buckets_are_powers_of_two_of_the_position():
    losses = np.arange(1.0, 11)  # of positions 1 to 10
    nats, tokens = bucket_sums(losses)
    assert tokens == [1, 2, 4, 3]
    assert nats == [1, 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 10]


def test_windows_cover_every_token_once_texts_in_turn(loaded):
    _, tokenizer = loaded
    texts = [Text("a", "a" * 25), Text("b", "b" * 9)]
    made = list(windows(texts, tokenizer, length=11, most=99))
    assert [(w.text == texts[0].digest, w.number) for w in made] == [
        *((True, 0), (False, 0), (True, 1), (True, 2))
    ]
    assert [len(w.ids) for w in made] == [11, 10, 11, 6]
    assert all(w.ids[0] == 256 for w in made)
    assert len(list(windows(texts, tokenizer, length=11, most=3))) == 3


def test_empty_and_missing_texts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        read_texts([f"{tmp_path}/*.txt"])
    with pytest.raises(UserError, match="no such file"):
        read_texts([f"{tmp_path}/*.md"])


def test_texts_and_lengths_with_nothing_to_predict_are_refused(loaded):
    _, tokenizer = loaded
    with pytest.raises(UserError, match=r"--seq-lengths 1: no room"):
        list(windows([Text("a", "abc")], tokenizer, length=1, most=1))
    tokenizer = PromptTokenizer(loaded[1].folder, first_token="none")
    with pytest.raises(UserError, match=r"--text b has 1 token"):
        list(windows([Text("a", "abc"), Text("b", "b")], tokenizer, length=8, most=1))


def test_a_text_given_twice_counts_once(tmp_path):
    for name, content in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / name).write_text(content)
    assert [text.content for text in read_texts([f"{tmp_path}/*"])] == ["one", "two"]


def test_lengths_beyond_the_model_are_refused_or_noted(folder):
    assert check_positions(folder, [2048], allow_longer=False) is None
    with pytest.raises(UserError, match=r"2048 positions .* 4096; .*--allow-longer"):
        check_positions(folder, [1024, 4096], allow_longer=False)
    assert "4096" in check_positions(folder, [4096], allow_longer=True)


def test_cuda_without_cuda_is_refused():
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            Placement("cuda").resolved()
        assert Placement().resolved() == CPU


JOB = HarnessJob(
    folder=Path("m"),
    tokenizer=Path("t"),
    lengths=[4096, 16384],
    num_samples=3,
    seed=7,
    batch_size=2,
    placement=CPU,
)


def test_the_harness_is_asked_for_the_same_samples_at_every_length():
    asked = JOB.task_arguments("ruler_vt")
    assert asked["samples"] == {"ruler_vt": [0, 1, 2, 500, 501, 502]}
    assert asked["metadata"]["max_seq_lengths"] == [4096, 16384]
    assert asked["random_seed"] == asked["fewshot_random_seed"] == 7
    assert JOB.model_arguments()["max_length"] == 16384
    assert harness_names(["niah_single_1", "vt", "qa"]) == [
        *("niah_single_1", "ruler_vt", "ruler_qa_squad", "ruler_qa_hotpot")
    ]


def test_the_harness_limits_are_told():
    with pytest.raises(UserError, match="--seq-lengths 5000"):
        check_harness([4096, 5000], num_samples=1)
    with pytest.raises(UserError, match="--num-samples 501"):
        check_harness([4096], num_samples=501)
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(UserError, match=r'pip install "lm-eval\[hf,ruler\]"'):
            check_harness([4096], num_samples=1)


def test_the_harness_itself_knows_our_names_arguments_and_lengths():
    """Against the real package, where it is installed."""
    pytest.importorskip("lm_eval")
    import inspect

    import yaml
    from lm_eval import simple_evaluate, tasks
    from lm_eval.models.huggingface import HFLM

    root = Path(tasks.__file__).parent / "ruler"
    names = {
        line.split(":")[1].strip()
        for path in root.glob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("task: ")
    }
    assert names >= set(harness_names(list(TASKS)))
    metrics = yaml.load(
        (root / "niah_single_1.yaml").read_text().replace("!function", ""), yaml.SafeLoader
    )["metric_list"]
    assert tuple(int(entry["metric"]) for entry in metrics) == LENGTHS
    inspect.signature(simple_evaluate).bind(None, **JOB.task_arguments("ruler_vt"))
    inspect.signature(HFLM.__init__).bind(None, **JOB.model_arguments())
