"""heteropp-data --chat: which tokens are learnt, against text written by hand and transformers."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from test_cli_data import documents, make, refusal, run
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from heteropp.data.integrity import verify
from heteropp.data.token_file import TokenFile, open_token_file
from heteropp.description.files import FileError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
# as Llama 2's: turns alternate, and an answer ends with the end of text
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# as those that keep an answer's thinking until the next question alone
FORGETFUL = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)

USER, ASSISTANT = "user", "assistant"
CHATS = [
    [("system", "Be brief."), (USER, "Why is\nthe sky blue?"), (ASSISTANT, "\nScattered, naïve.")],
    [(USER, "2 + 2?"), (ASSISTANT, "4"), (USER, "Sure? "), (ASSISTANT, " Yes \n"), (USER, "Good.")],
    [(USER, "Say it twice."), (ASSISTANT, "It."), (ASSISTANT, "It 🎈.")],
    [(USER, "Say nothing."), (ASSISTANT, "")],
]  # fmt: skip

Chat = list[tuple[str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


def write_tokenizer(folder: Path) -> Path:
    """A folder as models for chats come with; 330 tokens at most."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for chat in CHATS for _, text in chat], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_template(model: Path, template: str | None) -> Path:
    """The same folder with another template in the file beside its configuration."""
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    return model


def messages(chat: Chat) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in chat]


def write_chats(path: Path, rows: list[Any], field: str = "messages") -> Path:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        file.writelines(json.dumps({field: row}) + "\n" for row in rows)
    return path


def texts(file: TokenFile, model: Path) -> list[str]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(file)]


def learnt(file: TokenFile, model: Path) -> list[str]:
    """The text of each run of tokens that are learnt."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert file.answers is not None
    return [
        tokenizer.decode(file.tokens[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in file.answers.tolist()
    ]


def test_answers_are_learnt_with_what_ends_their_turn(tmp_path: Path, model: Path) -> None:
    source = write_chats(tmp_path / "a.jsonl", [messages(chat) for chat in CHATS])
    file = make(tmp_path / "a.tokens", source, "--chat", "--tokenizer", model)
    assert texts(file, model) == [
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in chat) for chat in CHATS
    ]
    # a newline before an answer and the one of the template are a token of their own here
    assert learnt(file, model) == [
        f"{text}<|im_end|>" for chat in CHATS for role, text in chat if role == ASSISTANT
    ]
    verify(file)


def test_transformers_finds_the_same_answers_by_marks(tmp_path: Path, model: Path) -> None:
    source = write_chats(tmp_path / "a.jsonl", [messages(chat) for chat in CHATS])
    options = (source, "--chat", "--tokenizer", model)
    found = make(tmp_path / "a.tokens", *options)
    with_template(model, MARKED)
    marked = make(tmp_path / "b.tokens", *options)
    assert marked.sha256 == found.sha256
    assert marked.answers is not None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    for chat, tokens, begin in zip(
        CHATS, documents(marked), [0, *marked.ends.tolist()], strict=False
    ):
        truth: Any = tokenizer.apply_chat_template(
            messages(chat), return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens == truth["input_ids"]
        places = {p - begin for first, last in marked.answers.tolist() for p in range(first, last)}
        assert [int(p in places) for p in range(len(tokens))] == truth["assistant_masks"]


def test_a_template_of_another_form(tmp_path: Path, model: Path) -> None:
    with_template(model, ALTERNATING)
    chat = [(USER, "Hi"), (ASSISTANT, "Hello."), (USER, "Bye"), (ASSISTANT, "So long.")]
    source = write_chats(tmp_path / "a.jsonl", [messages(chat)])
    file = make(tmp_path / "a.tokens", source, "--chat", "--tokenizer", model / "tokenizer.json")
    (text,) = texts(file, model)
    assert text == "<s>[INST] Hi [/INST] Hello. </s>[INST] Bye [/INST] So long. </s>"
    assert learnt(file, model) == [" Hello. </s>", " So long. </s>"]


def test_every_kind_of_file_and_content_gives_the_same(tmp_path: Path, model: Path) -> None:
    options = ("--chat", "--tokenizer", model)
    rows = [messages(chat) for chat in CHATS]
    file = make(tmp_path / "a.tokens", write_chats(tmp_path / "a.jsonl", rows), *options)
    packed = write_chats(tmp_path / "b.jsonl.gz", rows, "chat")
    assert make(tmp_path / "b.tokens", packed, *options, "--field", "chat").sha256 == file.sha256
    parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "c.parquet")
    table = make(tmp_path / "c.tokens", tmp_path / "c.parquet", *options)
    assert table.sha256 == file.sha256
    parts = [
        [{**m, "content": [{"type": "text", "text": t} for t in m["content"]]} for m in row]
        for row in rows
    ]
    in_parts = make(tmp_path / "d.tokens", write_chats(tmp_path / "d.jsonl", parts), *options)
    assert in_parts.sha256 == file.sha256


def test_the_figures_and_what_is_held_out(tmp_path: Path, model: Path) -> None:
    rows = [messages([(USER, f"{n}?"), (ASSISTANT, f"It is {n}.")]) for n in range(60)]
    source = write_chats(tmp_path / "a.jsonl", rows)
    options = (source, "--chat", "--tokenizer", model, "--hold-out", 0.3)
    code, stdout, _ = run(*options, "-o", tmp_path / "a.tokens", "--json")
    assert code == 0
    said = json.loads(stdout)["files"]
    files = [open_token_file(Path(row["path"])) for row in said]
    found = [text for file in files for text in learnt(file, model)]
    assert sorted(found) == sorted(f"It is {n}.<|im_end|>" for n in range(60))
    for row, file in zip(said, files, strict=True):
        assert file.answers is not None and 0 < row["documents"] < 60
        assert row["targets"] == sum(end - begin for begin, end in file.answers.tolist())
        assert row["sha256"] == file.sha256
        verify(file)
    _, stdout, _ = run(*options, "-o", tmp_path / "a.tokens")
    assert f"of {said[0]['documents']} conversations, {said[0]['targets']} of them" in stdout


def test_a_flipped_byte_among_the_answers_is_found(tmp_path: Path, model: Path) -> None:
    source = write_chats(tmp_path / "a.jsonl", [messages(CHATS[0])])
    make(tmp_path / "a.tokens", source, "--chat", "--tokenizer", model)
    content = bytearray((tmp_path / "a.tokens").read_bytes())
    content[-8] ^= 1
    (tmp_path / "a.tokens").write_bytes(content)
    with pytest.raises(FileError, match="is damaged"):
        verify(open_token_file(tmp_path / "a.tokens"))


def test_bad_conversations_are_refused(tmp_path: Path, model: Path) -> None:
    good = messages(CHATS[0])

    def refused(*rows: Any, field: str = "messages") -> str:
        source = write_chats(tmp_path / "a.jsonl", [good, *rows], field)
        return refusal(tmp_path, source, "--chat", "--tokenizer", model)

    assert "a.jsonl:1: 'messages' is missing; expected messages" in refused(field="chats")
    assert "a.jsonl:2: 'messages' is empty; expected messages" in refused([])
    assert "a.jsonl:2: 'messages' is of type str" in refused("user: hi")
    assert "a.jsonl:2, message 2 is of type str" in refused([good[0], "hello"])
    assert "a.jsonl:2, message 1 has no role" in refused([{"content": "hi"}])
    assert "message 1: its content is no text" in refused([{"role": "user", "content": 5}])
    assert "message 1: its content is no text" in refused([{"role": "user"}])
    picture = [{"type": "image", "image": "a.png"}]
    assert "a part of type 'image'" in refused([{"role": "user", "content": picture}])
    assert "a.jsonl:2 has no answer: none of its messages has role 'assistant'" in refused(
        messages([(USER, "Hello?")])
    )
    assert "half of a surrogate pair" in refused(messages([(ASSISTANT, "\ud800")]))
    with_template(model, ALTERNATING)
    assert (
        "a.jsonl:1: the chat template refuses it: roles must alternate user and assistant"
        in refused()
    )
    with_template(model, "{{ messages[0].nothing.at_all }}")
    assert "a.jsonl:1: the chat template refuses it: " in refused()
    with_template(model, "{% if")
    assert "a.jsonl:1: the chat template refuses it: " in refused()
    with_template(model, CHATML.replace("{{ message.content }}", "").replace("<|im_end|>\n", ""))
    assert "a.jsonl:1 has no answer: the chat template renders none" in refused()


def test_a_template_that_forgets_is_refused(tmp_path: Path, model: Path) -> None:
    with_template(model, FORGETFUL)
    chat = [
        (USER, "2 + 2?"),
        (ASSISTANT, "<think>Hm.</think>4"),
        (USER, "Sure?"),
        (ASSISTANT, "Yes"),
    ]
    options = ("--chat", "--tokenizer", model)
    said = refusal(tmp_path, write_chats(tmp_path / "a.jsonl", [messages(chat)]), *options)
    assert "a.jsonl:1: the chat template renders message 2 in one way" in said
    once = write_chats(tmp_path / "a.jsonl", [messages(chat[:2])])
    file = make(tmp_path / "once.tokens", once, *options)
    assert learnt(file, model) == ["<think>Hm.</think>4<|im_end|>"]


def test_bad_settings_are_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_chats(tmp_path / "a.jsonl", [messages(chat) for chat in CHATS])
    tokenizer = ("--tokenizer", model)
    assert "--chat needs a --tokenizer" in refusal(tmp_path, source, "--chat")
    for option in ("--end", "--separator"):
        said = refusal(tmp_path, source, "--chat", *tokenizer, option, "</s>")
        assert "--end and --separator are not for --chat" in said
    (tmp_path / "a.txt").write_text("text")
    said = refusal(tmp_path, tmp_path / "a.txt", "--chat", *tokenizer)
    assert "a.txt is no .jsonl, .jsonl.gz or .parquet file" in said
    with_template(model, None)
    said = refusal(tmp_path, source, "--chat", *tokenizer)
    assert "model has no chat template; expected one in its chat_template.jinja" in said
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refusal(tmp_path, source, "--chat", *tokenizer)
    assert "needs transformers, which is not installed: pip install 'hyperhetero[chat]'" in said
