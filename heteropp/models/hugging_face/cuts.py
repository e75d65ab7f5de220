"""How tensor parallelism cuts a family's parts: its own plan's styles, as our parameters."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace

from torch import nn

from heteropp.layout.parameter import Parameter
from heteropp.models.hugging_face.family import Family

COLUMN, PACKED_COLUMN, GATHER = "colwise", "packed_colwise", "colwise_gather_output"
ROW, PACKED_ROW, SPLIT = "rowwise", "packed_rowwise", "rowwise_split_input"
PARTIAL, LATENT, EXPERTS = "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts"
IDENTITY_EXPERT, LOCAL, WHOLE = "moe_identity_expert", "local_params", "replicate"
COLUMNS = (COLUMN, PACKED_COLUMN, GATHER)
ROWS = (ROW, PACKED_ROW, SPLIT)
OF_LAYERS = (*COLUMNS, *ROWS, LATENT)  # which are Linear
SUM = "all_reduce"
SUMS = (*ROWS, EXPERTS, SUM)  # whose results are parts of a sum
OF_MODULES = (PARTIAL, EXPERTS, IDENTITY_EXPERT, LOCAL, WHOLE, SUM)
_OLDER = {"colwise_rep": GATHER, "rowwise_rep": SPLIT}
# of families that transformers has no tensor-parallel plan for
_PLANS = {
    "gpt_oss": {
        "layers.*.self_attn": LOCAL,
        **{f"layers.*.self_attn.{name}_proj": COLUMN for name in "qkv"},
        "layers.*.self_attn.sinks": COLUMN,
        "layers.*.self_attn.o_proj": ROW,
        "layers.*.mlp.experts": EXPERTS,
        # gates and ups take turns along the last dimension, so that any even cut keeps pairs
        "layers.*.mlp.experts.gate_up_proj": ROW,
        "layers.*.mlp.experts.gate_up_proj_bias": ROW,
        "layers.*.mlp.experts.down_proj": COLUMN,
        "layers.*.mlp.experts.down_proj_bias": PARTIAL,
    }
}
# what families' plans leave out: parameters of whose gradient every rank has a part
_PARTIAL = {"apertus": "layers.*.mlp.act_fn"}
# families whose masks are of all heads, where their plan leaves a rank part of them
_UNCUT = {"doge", "inkling_text"}


@dataclass(frozen=True)
class Cuts:
    """The styles of one part, by the names of its modules and parameters."""

    styles: dict[str, str]
    copied: frozenset[str]  # modules before which the group has copies, not before their layers

    def of(self, name: str) -> str | None:
        """Returns the style of a module, or of a parameter that has one of its own."""
        return self.styles.get(name)

    def of_parameter(self, name: str) -> str | None:
        """Returns the style of a parameter: its own, or that of the module which has it."""
        return self.styles.get(name) or self.styles.get(name.rpartition(".")[0])


def plan_of(found: Family) -> dict[str, str]:
    """Returns a family's tensor-parallel plan, by pattern after the base model's name."""
    plan = found.config.base_model_tp_plan or _PLANS.get(found.config.model_type, {})
    if plan and (partial := _PARTIAL.get(found.config.model_type)):
        plan = {**plan, partial: PARTIAL}
    return {pattern: _OLDER.get(style, style) for pattern, style in plan.items()}


def cuts_of(found: Family, prefix: str, part: nn.Module) -> Cuts:
    """Returns how a part is cut; prefix: of its names in the base model, such as "layers.3."."""
    plan = plan_of(found)
    styles = {
        name: style
        for name in (
            *(name for name, _ in part.named_modules() if name),
            *(name for name, _ in part.named_parameters()),
        )
        if (style := plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f"{prefix}{name}")))
    }
    copied = frozenset(
        name for name, each in part.named_modules() if _is_copied(each, name, styles)
    )
    return Cuts(styles, copied)


def _is_copied(module: nn.Module, name: str, styles: dict[str, str]) -> bool:
    """Whether all that a module computes with its input is cut.

    Then one copy for the group serves all layers that take the input.
    """
    owned = [
        styles.get(f"{name}.{inner}") or styles.get(f"{name}.{inner}".rpartition(".")[0])
        for inner, _ in module.named_parameters()
    ]
    children = [styles.get(f"{name}.{inner}") for inner, _ in module.named_children()]
    return (
        bool(name)
        and children.count(COLUMN) + children.count(PACKED_COLUMN) > 1
        and set(owned) <= {COLUMN, PACKED_COLUMN, ROW, PARTIAL}
    )


def own_parameters(found: Family, prefix: str, part: nn.Module) -> tuple[Parameter, ...]:
    """Returns a part's parameters, by their names in it, and how they are cut.

    prefix: the part's name in the base model, such as "layers.3.". Buffers that belong to the
    weights are among them, frozen.
    """
    cuts, frozen = cuts_of(found, prefix, part), kept_buffers(part)
    values = {**dict(part.named_parameters()), **frozen}
    return tuple(
        replace(_parameter(cuts, name, tuple(value.shape)), trains=name not in frozen)
        for name, value in values.items()
    )


def kept_buffers(part: nn.Module) -> dict:
    """Returns the buffers that are part of the weights, by name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in part.named_modules()
        for key, value in module._buffers.items()
        if key not in module._non_persistent_buffers_set
        and value is not None
        and value.is_floating_point()
    }


def _parameter(cuts: Cuts, name: str, shape: tuple[int, ...]) -> Parameter:
    style = cuts.of_parameter(name)
    is_bias = name.endswith("bias") and name not in cuts.styles
    decays = len(shape) > 1
    if style in COLUMNS:
        cut = max(0, len(shape) - 2)
    elif style in ROWS and not is_bias:
        cut = len(shape) - 1
    else:
        return Parameter(name, shape, None, partial=style == PARTIAL, decays=decays)
    packed = (shape[cut] // 2,) * 2 if style in (PACKED_COLUMN, PACKED_ROW) else ()
    return Parameter(name, shape, cut, packed, decays=decays)


def tp_refusal(found: Family) -> str:
    """Says in a clause why tensor parallelism is not possible; "" where it is."""
    if found.config.model_type in _UNCUT:
        return f"the plan that model_type {found.config.model_type} has does not cut its masks"
    if not plan_of(found):
        return f"model_type {found.config.model_type} has no tensor-parallel plan"
    for kind in dict.fromkeys(found.kinds):
        i = found.source(kind)
        layer = found.base.layers[i]
        modules = dict(layer.named_modules())
        for name, style in cuts_of(found, f"layers.{i}.", layer).styles.items():
            if style not in (*OF_LAYERS, *OF_MODULES):
                return f"style {style} of {name} has no form here"
            if name in modules and style in OF_LAYERS and not isinstance(modules[name], nn.Linear):
                return f"{name}, of style {style}, is no Linear layer"
    return ""


def head_sizes(found: Family) -> dict[str, int]:
    """Returns the numbers of heads, by name, that a tensor-parallel degree must divide."""
    cut = {
        pattern.rpartition(".")[2] for pattern, style in plan_of(found).items() if style == COLUMN
    }
    ends = []
    if cut & {"q_proj", "q_b_proj", "qkv_proj", "query_key_value", "kv_b_proj"}:
        ends.append("attention_heads")
    if cut & {"k_proj", "qkv_proj", "query_key_value"}:
        ends.append("key_value_heads")
    whole = copy.copy(found.config)
    whole.allow_global_per_layer_attribute_access = True
    known = whole.to_dict()
    layers = (known.get("per_layer_config") or {}).values()
    sizes = {}
    # some layers may have other numbers, as those with a window do
    names = [f"num_{end}" for end in ends]
    for name in dict.fromkeys((*names, *(key for key in known if key.endswith(tuple(ends))))):
        value = getattr(whole, name, None)
        values = value if isinstance(value, list) else [value]
        each = dict.fromkeys((*values, *(layer[name] for layer in layers if name in layer)))
        for i, size in enumerate(size for size in each if size):
            sizes[f"{name}[{i}]" if len(each) > 1 else name] = size
    return sizes
