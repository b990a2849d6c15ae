"""Exported tokenizers begin texts and chats with the anchor once, however they are asked."""

import json
import shutil
from argparse import Namespace

import pytest

from megatron_anchor.checkpoint import hugging_face_config
from megatron_anchor.checkpoint import to_hugging_face as export
from megatron_anchor.checkpoint.anchored_tokenizer import (
    add_anchor,
    recorded_anchor,
    trained_anchor,
)
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.harness import tokenizer_with
from megatron_anchor.evaluation.tokens import PromptTokenizer
from tests.conversion_models import SHAPE, hugging_face_model
from tests.family_tokenizers import BOS, EOS, FAMILIES, IDS, family_tokenizer

TALK = [{"role": "user", "content": "Hello"}]
CASES = [(family, token) for family in FAMILIES for token in (BOS, EOS)]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_one_anchor(folder, anchor):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder)
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["Hello", " a  b\n", ""]
    bare = [alone.encode(text, add_special_tokens=False).ids for text in texts]
    expected = [[anchor, *ids] for ids in bare]
    assert [alone.encode(text).ids for text in texts] == expected
    assert [row.ids for row in alone.encode_batch(texts)] == expected
    assert [library(text)["input_ids"] for text in texts] == expected
    assert library(texts)["input_ids"] == expected
    pair = [anchor, *bare[0], *bare[1]]
    assert alone.encode(*texts[:2]).ids == library(*texts[:2])["input_ids"] == pair
    assert library("Hello", add_special_tokens=False)["input_ids"] == bare[0]
    ids = library.apply_chat_template(TALK, return_dict=True, add_generation_prompt=True)
    shown = library.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    again = library(shown, add_special_tokens=False)["input_ids"]
    assert ids["input_ids"] == again == alone.encode(shown, add_special_tokens=False).ids
    assert again[0] == anchor
    assert not {256, 257} & set(again[1:])


@pytest.mark.parametrize("jinja", [False, True], ids=["in config", "jinja"])
@pytest.mark.parametrize(("family", "token"), CASES)
def test_texts_pairs_and_chats_begin_with_one_anchor(tmp_path, family, token, jinja):
    folder = family_tokenizer(tmp_path, family, jinja=jinja)
    if (family, token) == ("llama3", EOS):  # its template writes another bos amid its code
        with pytest.raises(
            UserError, match=r"the chat template in .*begin.*first.*--keep-tokenizer"
        ):
            add_anchor(folder, IDS[token])
        return
    assert add_anchor(folder, IDS[token])
    assert_one_anchor(folder, IDS[token])
    written = content(folder)
    add_anchor(folder, IDS[token])
    assert content(folder) == written


@pytest.mark.parametrize(
    ("processor", "what"),
    [
        ({"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 0]}, "BertProcessing"),
        (
            {
                "type": "RobertaProcessing",
                "sep": ["b", 1],
                "cls": ["a", 0],
                "trim_offsets": True,
                "add_prefix_space": True,
            },
            "RobertaProcessing",
        ),
    ],
)
def test_other_post_processors_are_refused(tmp_path, processor, what):
    path = family_tokenizer(tmp_path, "none") / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": processor}))
    with pytest.raises(UserError, match=rf"post_processor is {what}.*--keep-tokenizer"):
        add_anchor(tmp_path, 257)


def test_what_cannot_be_done_is_refused_with_a_remedy(tmp_path):
    folder = family_tokenizer(tmp_path / "a", "qwen")
    with pytest.raises(UserError, match=r"no token 999.*--keep-tokenizer"):
        add_anchor(folder, 999)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    with pytest.raises(UserError, match="Python code of the folder's own"):
        add_anchor(folder, 257)
    path.write_text(json.dumps({**config, "chat_template": "{{ raise_exception('never') }}"}))
    with pytest.raises(UserError, match=r"renders no conversation \(never\)"):
        add_anchor(folder, 257)


def test_a_tokenizer_without_tokenizer_json_is_refused(tmp_path):
    folder = family_tokenizer(tmp_path, "qwen")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json.*save_pretrained"):
        add_anchor(folder, 257)


def test_the_anchor_is_that_of_the_run(tmp_path):
    folder = family_tokenizer(tmp_path, "llama3")
    run = {"attention_pattern": "anchor"}
    assert trained_anchor(Namespace(**run, anchor_token=None), folder, {}) == 256
    assert trained_anchor(Namespace(**run, anchor_token="eos"), folder, {}) == 257
    assert trained_anchor(Namespace(**run, anchor_token="7"), None, None) == 7
    assert trained_anchor(Namespace(**run, anchor_token="eos"), None, None) is None
    assert trained_anchor(Namespace(anchor_token="7"), folder, {}) is None
    with pytest.raises(UserError, match=r"anchor_token_id is -1"):
        recorded_anchor({"megatron_anchor": {"anchor_token_id": -1}})


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A converted Qwen whose arguments say that it was trained behind its eos."""
    monkeypatch.setitem(SHAPE, "vocab_size", 259)
    hugging_face_model("qwen2").save_pretrained(tmp_path / "hf")
    family_tokenizer(tmp_path / "hf", "qwen")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", progress=False)
    monkeypatch.setattr(
        export,
        "trained_anchor",
        lambda args, *rest: trained_anchor(
            Namespace(**{**vars(args), "attention_pattern": "anchor"}), *rest
        ),
    )
    return tmp_path


def test_an_export_keeps_the_anchor_and_comes_back(trained):
    done = convert_to_hugging_face(trained / "megatron", trained / "out", progress=False)
    assert any("puts the anchor 257" in note for note in done.notes)
    config = hugging_face_config.read_config(trained / "out")
    assert config["megatron_anchor"] == {"anchor_token_id": 257}
    assert_one_anchor(trained / "out", 257)
    again = {"like": trained / "out", "progress": False}
    convert_to_hugging_face(trained / "megatron", trained / "again", **again)
    first, second = content(trained / "out"), content(trained / "again")
    # the order of keys depends on the config that an export starts from
    assert json.loads(first.pop("config.json")) == json.loads(second.pop("config.json"))
    assert first == second
    convert_to_megatron(trained / "out", trained / "back", progress=False)


def test_opting_out_leaves_the_tokenizer_as_it_is(trained):
    convert_to_hugging_face(
        trained / "megatron", trained / "out", keep_tokenizer=True, progress=False
    )
    given, written = content(trained / "hf"), content(trained / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        assert written[name] == given[name]
    assert json.loads(written["config.json"])["megatron_anchor"] == {"anchor_token_id": 257}


def test_evaluation_takes_the_recorded_anchor_and_tells_a_difference(tmp_path):
    folder = family_tokenizer(tmp_path, "qwen")
    tokenizer = PromptTokenizer(folder, recorded=257)
    assert tokenizer.encode("a")[0] == 257
    assert "begins texts with nothing" in tokenizer.note
    assert PromptTokenizer(folder, first_token="none", recorded=257).first == []
    add_anchor(folder, 257)
    tokenizer = PromptTokenizer(folder, recorded=257)
    assert (tokenizer.first, tokenizer.note) == ([257], None)
    with pytest.raises(UserError, match="records the anchor 999"):
        PromptTokenizer(folder, recorded=999)


def test_the_harness_gets_a_tokenizer_that_adds_the_token(tmp_path):
    from transformers import AutoTokenizer

    folder = family_tokenizer(tmp_path / "a", "llama3")
    before = content(folder)
    with tokenizer_with(folder, [257]) as copied:
        assert AutoTokenizer.from_pretrained(copied)("a")["input_ids"][0] == 257
    assert not copied.exists()
    with tokenizer_with(folder, []) as same:
        assert same == folder
    assert content(folder) == before
    shutil.rmtree(folder)
