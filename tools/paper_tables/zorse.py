"""Zorse: the groups it finds (section 6.2), and the order of systems of Table 5."""

from __future__ import annotations

from collections import Counter

from evidence import Row, row

from heteropp.description.cluster import read_cluster
from heteropp.description.model import read_model
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import Verdict, ask
from heteropp.search.planner import Request

TOKENS = 1 << 20  # of a step (section 6.1)
# Table 5: TFLOPS of Zorse and of TorchTitan-Het; None where it ran out of memory
PUBLISHED = {
    ("zorse-a", "7b"): (4370.56, 4223.80),
    ("zorse-a", "13b"): (4917.87, 3837.49),
    ("zorse-a", "33b"): (5281.64, 944.47),
    ("zorse-a", "65b"): (5239.13, None),
    ("zorse-b", "7b"): (3412.88, 2033.53),
    ("zorse-b", "13b"): (2965.64, 1956.09),
    ("zorse-b", "33b"): (2658.29, None),
    ("zorse-c", "7b"): (3936.94, 2441.70),
    ("zorse-c", "13b"): (3357.97, 2061.55),
    ("zorse-c", "33b"): (1548.60, None),
}

ASSUMPTIONS = [
    "a step is 1 Mi tokens, in sequences of 4,096, 1,024 and 512 on clusters A, B and C; bfloat16",
    "TFLOPS are 8 x parameters x tokens / step: forward, recompute and backward, as the paper's "
    "hardware FLOPS count activation checkpointing",
    "TorchTitan-Het stands for pipeline, tensor and data parallelism of stages of one chip type: "
    "our exact planner's plan",
]


def table() -> tuple[list[Row], list[str]]:
    rows = []
    for (preset, size), (zorse, torchtitan) in PUBLISHED.items():
        model = read_model(f"{preset}-llama-{size}")
        request = Request(
            cluster=read_cluster(preset),
            model=model,
            global_batch=TOKENS // model.sequence_length,
        )
        verdict, other = ask("zorse", request, 1), ask("exact", request, 1)
        name = f"{preset} {size}"
        groups = f", groups {_groups(verdict)}" if verdict.judged else ": does not fit"
        rows.append(
            row(f"{name}: zorse{groups}", "TFLOPS", _tflops(verdict, model), peer=zorse,
                peer_name="published", better="higher")
        )  # fmt: skip
        rows.append(
            row(f"{name}: 3D parallel (exact)", "TFLOPS", _tflops(other, model), peer=torchtitan,
                peer_name="published" if torchtitan else "published: out of memory",
                better="higher")
        )  # fmt: skip
    return rows, ASSUMPTIONS


def _tflops(verdict: Verdict, model: LlamaModel) -> float | None:
    if not verdict.judged:
        return None
    return 8 * _parameters(model) * TOKENS / verdict.best.simulation.step_s / 1e12


def _parameters(model: LlamaModel) -> int:
    attention = 2 * model.hidden * (model.hidden + model.kv_heads * model.head_size)
    layer = attention + 3 * model.hidden * model.intermediate
    return model.layers * layer + 2 * model.vocab * model.hidden


def _groups(verdict: Verdict) -> str:
    """Chips of each group, groups that are alike together."""
    words = []
    for stage in verdict.best.plan.pipelines[0].stages:
        held = Counter(replica.chip for replica in stage.replicas)
        words.append(" + ".join(f"{n} {chip}" for chip, n in sorted(held.items())))
    return ", ".join(f"{n} x {w}" if n > 1 else w for w, n in Counter(words).items())
