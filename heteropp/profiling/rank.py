"""Measures what it is told on standard input, on this process's chip.

The first line is the chip and the model, every other one a block of layers, a single operator, or
the host's part; each is answered by one line.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from pydantic import TypeAdapter

from heteropp.description.profile import Block
from heteropp.models.spec import ModelSpec
from heteropp.profiling.blocks import measure
from heteropp.profiling.operator_times import issuing_s, operator_s
from heteropp.profiling.operators import Operator
from heteropp.runtime.ranks.device import open_device


def main() -> None:
    """Measures what standard input names, and answers with a line of JSON for each.

    Answers go to the standard output that it was given; all else that is printed goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def answer(kind: str, content: Any) -> None:
        answers.write(json.dumps({kind: content}) + "\n")

    try:
        start = json.loads(sys.stdin.readline())
        model = TypeAdapter(ModelSpec).validate_json(json.dumps(start["model"]))
        model.allow_code(trust_remote_code=True)  # heteropp-profile was given the permission
        device = open_device("chip", start["chip"], start["chip_type"])
    except Exception as error:
        answer("failed", f"{type(error).__name__}: {_one_line(error)}")
        return
    answer("ready", str(device.device))
    for line in sys.stdin:
        try:
            (what, content), *_ = json.loads(line).items()
            if what == "block":
                block = TypeAdapter(Block).validate_json(json.dumps(content))
                answer("measured", asdict(measure(model, block, device)))
            elif what == "operator":
                operator = TypeAdapter(Operator).validate_json(json.dumps(content))
                answer("measured", operator_s(operator, device))
            else:
                answer("measured", issuing_s(model, device))
        except torch.OutOfMemoryError as error:
            answer("out_of_memory", _one_line(error))
        except Exception as error:
            answer("failed", f"{type(error).__name__}: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
