"""What transformers does to a folder's tensors when it loads a model, done to assemblies of slices.

A folder's tensors need not be the model's parameters: those of many families have every expert by
itself, or older names. Which of them are converted, and how, is transformers' own to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from heteropp.models.assembly import Assembly
from heteropp.models.hugging_face_format import Shapes


@dataclass
class Conversion:
    """Tensors of a folder that become a parameter, or several."""

    first: str  # the first of the parameters, by transformers' name
    converter: Any = None  # transformers'; None: the tensor is the parameter
    tensors: list[tuple[str, str]] = field(default_factory=list)  # name, and the pattern it is of

    def parameters(self) -> list[str]:
        if self.converter is None:
            return [self.first]
        head, *_ = targets = self.converter.target_patterns
        return [self.first.replace(head, target) for target in targets]

    def run(self, model: Any, stored: Shapes) -> dict[str, Assembly]:
        """Returns the parameters. Raises whatever transformers' operations raise."""
        found = {name: Assembly.of(name, stored[name]) for name, _ in self.tensors}
        if self.converter is None:
            return {self.first: found[self.tensors[0][0]]}
        converter = deepcopy(self.converter)
        for name, pattern in self.tensors:
            converter.add_tensor(self.first, name, pattern, found[name])
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: _only(value) for name, value in made.items()}


def conversions(model: Any, names: Iterable[str]) -> tuple[dict[str, Conversion], list[str]]:
    """Returns the conversion of each parameter, by transformers' name, of a folder's tensors.

    And the tensors that are of no parameter, but for those that the family leaves aside.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):  # the order of experts
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], prefix, known)
        if renamed not in known:
            unexpected[renamed] = name
            continue
        converter = of_pattern[pattern] if pattern else None
        conversion = found.setdefault(renamed, Conversion(renamed, converter))
        conversion.tensors.append((name, pattern or name))
    left = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(left)
    made = {name: each for each in found.values() for name in each.parameters()}
    return made, [name for renamed, name in unexpected.items() if renamed in left.unexpected_keys]


def written(model: Any, parameters: Mapping[str, Assembly]) -> dict[str, Assembly]:
    """Returns the tensors of a folder that transformers would save of parameters, by its names."""
    from transformers.core_model_loading import revert_weight_conversion

    as_tensors: dict[str, Any] = dict(parameters)
    tensors = revert_weight_conversion(model, as_tensors)
    return {name: _only(value) for name, value in tensors.items()}


def _only(value: Any) -> Assembly:
    return value[0] if isinstance(value, list) else value
