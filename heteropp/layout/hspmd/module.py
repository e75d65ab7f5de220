"""Annotates a plain module, written for one device, so that it runs on unlike groups of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils import parametrize

from heteropp.layout.hspmd.annotation import Annotation, AnnotationError
from heteropp.layout.hspmd.tensor import AnnotatedTensor, annotated, communicate, gradient_moved


def annotate(
    module: nn.Module,
    parameters: Mapping[str, Annotation],
    used: Mapping[str, Annotation] | None = None,
    inputs: Mapping[str, Annotation] | None = None,
    outputs: Mapping[str, Annotation] | None = None,
) -> nn.Module:
    """Cuts a module's parameters, which every rank has alike, and inserts what communicates.

    parameters: by name, how each is held; its gradient comes to lie so too.
    used: by name, how a parameter is to lie where it is used, if not as it is held.
    inputs, outputs: by submodule, how its first argument or its result is to lie: where
    communication operators stand (section 5.1).
    The module takes and gives annotated tensors from then on. Raises AnnotationError.
    """
    used, inputs, outputs = used or {}, inputs or {}, outputs or {}
    named, submodules = dict(module.named_parameters()), dict(module.named_modules())
    for name in named.keys() - parameters.keys():
        raise AnnotationError(f"parameter {name} has no annotation; expected one for each")
    for name in (parameters.keys() | used.keys()) - named.keys():
        raise AnnotationError(f"parameter {name} is annotated; the module has no such")
    for name in (inputs.keys() | outputs.keys()) - submodules.keys():
        raise AnnotationError(f"submodule {name} is annotated; the module has no such")
    _check_tied(module)
    for name, parameter in named.items():
        place, _, own_name = name.rpartition(".")
        held = nn.Parameter(annotated(parameter, parameters[name]), parameter.requires_grad)
        if held.requires_grad:
            held.register_hook(_Summed(parameters[name]))
        owner = submodules[place]
        if name in used:
            communicated = _Communicated(used[name])
            parametrize.register_parametrization(owner, own_name, communicated, unsafe=True)
            owner, own_name = owner.parametrizations[own_name], "original"
        setattr(owner, own_name, held)
    for name, target in inputs.items():
        submodules[name].register_forward_pre_hook(_Before(name, target))
    for name, target in outputs.items():
        submodules[name].register_forward_hook(_After(target))
    return module


def _check_tied(module: nn.Module) -> None:
    names: dict[nn.Parameter, str] = {}
    for place, owner in module.named_modules():
        own = owner.named_parameters(place, recurse=False, remove_duplicate=False)
        for name, parameter in own:
            first = names.setdefault(parameter, name)
            if first != name:
                raise AnnotationError(
                    f"parameters {first} and {name} are tied; expected one name for each"
                )


class _Before:
    """A communication operator before a submodule."""

    def __init__(self, name: str, target: Annotation) -> None:
        self.name, self.target = name, target

    def __call__(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not arguments:
            raise AnnotationError(
                f"submodule {self.name} has an annotated input and is called with keywords only; "
                "expected its first argument by position"
            )
        return communicate(arguments[0], self.target), *arguments[1:]


class _After:
    """A communication operator behind a submodule."""

    def __init__(self, target: Annotation) -> None:
        self.target = target

    def __call__(self, _module: nn.Module, _arguments: object, result: Tensor) -> Tensor:
        return communicate(result, self.target)


class _Communicated(nn.Module):
    """A communication operator between where a parameter is held and where it is used."""

    def __init__(self, target: Annotation) -> None:
        super().__init__()
        self.target = target

    def forward(self, parameter: Tensor) -> Tensor:
        return communicate(parameter, self.target)


class _Summed:
    """Brings a parameter's gradient to where the parameter lies."""

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation

    def __call__(self, gradient: Tensor) -> Tensor:
        assert isinstance(gradient, AnnotatedTensor)
        return gradient_moved(gradient, self.annotation)
