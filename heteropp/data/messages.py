"""What a conversation in a file must be: a list of messages, each with a role and a content."""

from __future__ import annotations

import json
from typing import Any

from heteropp.description.files import FileError

ASSISTANT = "assistant"  # the role whose messages are learnt


def conversation_text(value: object, field: str, where: str) -> bytes:
    """Returns a conversation as JSON, equal for equal ones: `messages_of` reads it.

    Raises FileError for what is none, or has no answer.
    """
    expected = "expected messages, [{role, content}, ...] (--field names another)"
    if value is None:
        raise FileError(f"{where}: {field!r} is missing; {expected}")
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else f"of type {type(value).__name__}"
        raise FileError(f"{where}: {field!r} is {kind}; {expected}")
    messages = [_message(m, f"{where}, message {i}") for i, m in enumerate(value, 1)]
    if all(message["role"] != ASSISTANT for message in messages):
        raise FileError(f"{where} has no answer: none of its messages has role {ASSISTANT!r}")
    try:
        return json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FileError(f"{where}: {field!r} has half of a surrogate pair") from None
    except TypeError as error:  # of a Parquet file, which holds more than JSON
        raise FileError(f"{where}: {field!r} is not JSON: {error}") from None


def messages_of(text: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _message(value: object, where: str) -> dict[str, Any]:
    """Returns a message whose content is text, with whatever else a template may look for."""
    if not isinstance(value, dict):
        raise FileError(f"{where} is of type {type(value).__name__}; expected {{role, content}}")
    message = {key: each for key, each in value.items() if each is not None}
    if not isinstance(message.get("role"), str):
        raise FileError(f"{where} has no role; expected one such as 'user' or {ASSISTANT!r}")
    if "content" in message or "tool_calls" not in message:
        message["content"] = _text(message.get("content"), where)
    return message


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            what = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else "no text"
            raise FileError(f"{where}: its content is {what}; expected text, or parts of type text")
        if not isinstance(part.get("text"), str):
            raise FileError(f"{where}: a part of its content has no text")
        texts.append(part["text"])
    return "".join(texts)
