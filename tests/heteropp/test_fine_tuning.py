"""The README's fine-tuning, command by command: conversations, LoRA, four vendors, peft."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conversations import write_chats, write_tokenizer
from tiny_decoders import write_folder
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

LENGTH = 96
QUESTION, ANSWER = "What is {a} + {b}?", "It is {sum}."


def conversations(count: int, first: int) -> list[list[dict[str, str]]]:
    """Some have two questions and some one, so that their lengths differ."""
    found = []
    for n in range(first, first + count):
        found.append([])
        for a in (n, n + 7)[: 1 + n % 2]:
            numbers = {"a": a, "b": 3, "sum": a + 3}
            found[-1].append({"role": "user", "content": QUESTION.format(**numbers)})
            found[-1].append({"role": "assistant", "content": ANSWER.format(**numbers)})
    return found


def run(folder: Path, *words: object) -> None:
    command = [Path(sys.executable).parent / words[0], *words[1:]]
    subprocess.run([str(word) for word in command], cwd=folder, check=True, timeout=300)


def loss_of_answers(model: Any, tokenizer: Tokenizer, chats: list) -> float:
    """The mean over all tokens of answers, each conversation alone."""
    total = count = 0
    for chat in chats:
        text, answers = "", []
        for message in chat:
            text += f"<|im_start|>{message['role']}\n"
            begins = len(text)
            text += f"{message['content']}<|im_end|>"
            if message["role"] == "assistant":
                answers.append((begins, len(text)))
            text += "\n"
        encoded = tokenizer.encode(text)
        ids = torch.tensor(encoded.ids)
        learnt = [
            any(begin <= at[0] and at[1] <= end for begin, end in answers) for at in encoded.offsets
        ]
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        chosen = torch.tensor(learnt[1:])
        total += cross_entropy(logits[chosen], ids[1:][chosen], reduction="sum").item()
        count += int(chosen.sum())
    return total / count


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_conversations_teach_lora_over_four_vendors(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    write_tokenizer(base)
    write_folder(
        base, "qwen3", noise=0.05, layers=6, vocab_size=330, max_position_embeddings=LENGTH
    )
    held_out = conversations(9, 50)
    write_chats(tmp_path / "chats.jsonl", conversations(48, 0))
    write_chats(tmp_path / "held-out.jsonl", held_out)
    for name in ("chats", "held-out"):
        chat = ("--chat", "--tokenizer", base, "--output", f"{name}.tokens")
        run(tmp_path, "heteropp-data", f"{name}.jsonl", *chat)
    lora = ("--lora", "r=8,targets=all-linear", "--sequence-length", LENGTH)
    all_chips = ("--planner", "exact")
    plan = ("--global-batch", 8, *all_chips, "--output", "plan.json")
    run(tmp_path, "heteropp-search", "--cluster", "quickstart", "--model", base, *lora, *plan)
    data = ("--data", "chats.tokens", "--validation", "held-out.tokens", "--validate-every", 12)
    given = ("--plan", "plan.json", "--cluster", "quickstart", "--from", base, *data)
    run(tmp_path, "heteropp-train", *given, "--steps", 12, "--learning-rate", 0.01)
    run(tmp_path, "heteropp-export", "runs/train", "--from", base, "--output", "adapter")
    run(tmp_path, "heteropp-export", "runs/train", "--from", base, "--merged", "--output", "whole")

    planned = json.loads((tmp_path / "plan.json").read_text())
    stages = planned["pipelines"][0]["stages"]
    assert len({stage["replicas"][0]["chip"] for stage in stages}) == 4
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    before = loss_of_answers(model, tokenizer, held_out)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    after = loss_of_answers(adapted, tokenizer, held_out)
    last = json.loads((tmp_path / "runs/train/metrics.jsonl").read_text().splitlines()[-1])
    assert after < 0.85 * before
    assert last["validation_loss"] == pytest.approx(after, rel=2e-3)  # chips have own numerics
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    tokens = torch.randint(330, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        merged, beside = (m(input_ids=tokens, use_cache=False).logits for m in (whole, adapted))
    torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
