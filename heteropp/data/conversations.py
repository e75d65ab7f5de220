"""Conversations to tokens, by the tokenizer's own chat template; only the answers are learnt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heteropp.data.documents import Document
from heteropp.data.messages import ASSISTANT, messages_of
from heteropp.data.tokenizer import Encoded, HuggingFace
from heteropp.description.files import FileError

# what some templates have before each answer, for others to find it
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Answers = list[tuple[int, int]]  # where they begin and end in the rendered text


class Conversations:
    """Makes tokens of conversations, as `read_documents` gives them.

    An answer is learnt with the token that ends its turn. A conversation ends as the template says.
    """

    def __init__(self, path: Path) -> None:
        """`path`: a tokenizer.json that has its chat template beside it, or their folder.

        Raises FileError.
        """
        self.plain = HuggingFace(path, end="")
        self.name, self.sha256 = self.plain.name, self.plain.sha256
        self.vocabulary = self.plain.vocabulary
        self.template = _Template(path if path.is_dir() else path.parent)
        added = self.plain.tokenizer.get_added_tokens_decoder()
        self.special = [token for token, kind in added.items() if kind.special]

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Returns each conversation's tokens. Raises FileError, which names it."""
        rendered = [
            self.template.render(messages_of(document.text), document.where)
            for document in documents
        ]
        encodings = self.plain.tokenizer.encode_batch(
            [text for text, _ in rendered], add_special_tokens=False
        )
        result = []
        for document, (text, answers), encoding in zip(documents, rendered, encodings, strict=True):
            ids, offsets = np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64)
            is_learnt = np.zeros(len(ids) + 1, bool)
            for answer in answers:
                is_learnt[self._within(answer, text, ids, offsets)] = True
            is_learnt[0] = False  # it follows from nothing
            ranges = np.flatnonzero(np.diff(is_learnt, prepend=False)).reshape(-1, 2)
            if not len(ranges):
                raise FileError(f"{document.where} has no answer: the chat template renders none")
            result.append(Encoded(ids, ranges))
        return result

    def _within(
        self, answer: tuple[int, int], text: str, ids: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Returns which tokens begin in an answer.

        The spaces that a template puts behind the token that ends a turn are none of its own.
        """
        begin, end = answer
        own = np.flatnonzero((offsets[:, 0] >= begin) & (offsets[:, 0] < end))
        special = own[np.isin(ids[own], self.special)]
        if len(special) and not text[offsets[special[-1], 1] : end].strip():
            own = own[own <= special[-1]]
        return own


class _Template:
    """A tokenizer's chat template."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import PreTrainedTokenizerFast, logging
        except ImportError:
            raise FileError(
                "--chat needs transformers, which is not installed: pip install 'hyperhetero[chat]'"
            ) from None
        logging.set_verbosity_error()  # which class the model names is of no matter here
        try:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            found = self.tokenizer.chat_template
            self.text = self.tokenizer.get_chat_template() if found else ""
        except Exception as error:
            raise FileError(f"{folder} is not a tokenizer's: {_line(error)}") from None
        if not self.text:
            raise FileError(
                f"{folder} has no chat template; expected one in its chat_template.jinja or "
                "tokenizer_config.json"
            )

    def render(self, messages: list[dict[str, Any]], where: str) -> tuple[str, Answers]:
        """Returns a conversation's text and where its answers are. Raises FileError."""
        try:
            if MARK.search(self.text):
                return self._by_marks(messages)
            return self._by_beginnings(messages, where)
        except FileError:
            raise
        except Exception as error:  # whatever a template may come to
            raise FileError(f"{where}: the chat template refuses it: {_line(error)}") from None

    def _by_marks(self, messages: list[dict[str, Any]]) -> tuple[str, Answers]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [messages],
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (answers,) = rendered
        return text, answers

    def _by_beginnings(self, messages: list[dict[str, Any]], where: str) -> tuple[str, Answers]:
        """An answer is what its message adds to the text that asks for it."""
        text = self._text(messages)
        answers: Answers = []
        for i, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                asked = self._text(messages[:i], add_generation_prompt=True)
                answered = self._text(messages[: i + 1])
                if not (answered.startswith(asked) and text.startswith(answered)):
                    raise FileError(
                        f"{where}: the chat template renders message {i + 1} in one way where it "
                        "is asked for and in another in the whole conversation (as those do that "
                        "drop earlier thinking); expected a template whose text only grows, or "
                        "one that marks answers with {% generation %}"
                    )
                answers.append((len(asked), len(answered)))
        return text, answers

    def _text(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
