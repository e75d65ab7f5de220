"""What everything else knows of a model: its parts, its parameters, and what it can do.

A family of models is a folder beside this file; its `model.py` has a ModelSpec. This module needs
no torch: a planner asks for parameters and degrees, and only what traces or trains builds stages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

from heteropp.layout.parameter import Parameter

if TYPE_CHECKING:
    import torch
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from torch import Tensor

    from heteropp.models.hugging_face_format import HuggingFaceFormat
    from heteropp.models.parallel.context_parallel import ContextParallelGroup
    from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
    from heteropp.models.parallel.tensor_parallel import TensorParallelGroup
    from heteropp.models.stage_module import StageModule

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Attention = Literal["explicit", "fused"]
BlockCounts = tuple[tuple[str, int], ...]  # kinds of blocks, and how many of each

LARGEST = 2**24  # of any size; what is larger is a slip, and would keep a planner busy for ever


class ModelError(ValueError):
    """A model that cannot be; the message is one sentence."""


class NoFormError(ModelError):
    """A model that can be, but that a family's own modules have no form of."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """A model of `layers` blocks between an embedding and a head that ends in the loss.

    Parameters have global names: those of block 17 begin with "layers.17.", wherever it is held.
    A stage that holds block 0 embeds, and one that holds the last block ends in the loss.
    """

    family: str  # the family of models, which decides the other keys
    name: str  # the model's name
    layers: int  # number of blocks
    hidden: int  # size of a token's activation between blocks
    vocab: int  # number of tokens in the vocabulary
    sequence_length: int  # number of tokens in a sequence
    # those of 16 bits keep a master copy, and sum gradients, in float32; float16 scales its loss
    dtype: Dtype = "float32"  # dtype of weights and activations

    @property
    def dtype_bytes(self) -> int:
        """The bytes of one element of a parameter."""
        return {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def wide_dtype(self) -> str:
        """The dtype of gradients and of the optimizer's state: float32 for a 16-bit model."""
        return "float32" if self.dtype_bytes == 2 else self.dtype

    # ---------------------------------------------------------------- parameters

    @abstractmethod
    def parameters(self, layers: tuple[int, int] | None = None) -> list[Parameter]:
        """Returns the parameters of a stage with blocks [first, last), or of the whole model.

        They are in global order, under the names that the stage's module gives them. A parameter
        that is tied to another of the same stage is left out.
        """

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of parameters that are others, such as a head's that is the embedding's."""
        return {}

    def global_name(self, name: str) -> str:
        """Returns a parameter's name in the whole model: of a tied one, what it is tied to."""
        return self.tied.get(name, name)

    def untied(self) -> ModelSpec:
        """Returns the model with a parameter of its own in place of each tied one."""
        return self

    @cached_property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the whole model, in global order."""
        return tuple(self.parameters())

    @cached_property
    def tied_elements(self) -> int:
        """Returns the number of elements of parameters that train and others are tied to."""
        names = set(self.tied.values())
        if not names:
            return 0
        return sum(math.prod(p.shape) for p in self.all_parameters if p.trains and p.name in names)

    def elements(self) -> int:
        """Returns the number of elements of all parameters."""
        return sum(math.prod(p.shape) for p in self.parameters())

    def active_elements(self) -> int:
        """Returns the number of elements that a token meets: of experts, those it goes to."""
        return self.elements()

    # ---------------------------------------------------------------- blocks

    def block_kind(self, layer: int) -> str:
        """Returns the kind of a block; blocks of one kind cost the same."""
        return "block"

    def block_counts(self, ranges: Iterable[tuple[int, int]]) -> BlockCounts:
        """Returns how many blocks of each kind there are in ranges [first, last), by kind."""
        kinds = Counter(chain.from_iterable(self._block_kinds[slice(*span)] for span in ranges))
        return tuple(sorted(kinds.items()))

    @cached_property
    def _block_kinds(self) -> tuple[str, ...]:
        return tuple(map(self.block_kind, range(self.layers)))

    def repeated(self, kind: str, layers: int) -> ModelSpec:
        """Returns a model with so many blocks, all of one kind."""
        return replace(self, layers=layers)

    def identity(self) -> dict[str, Any]:
        """Returns what a run that goes on from a checkpoint may not change, by name."""
        return asdict(self)

    def cost_key(self) -> dict[str, Any]:
        """Returns all that the cost of a stage depends on, as JSON has it."""
        return {k: v for k, v in asdict(self).items() if k not in ("name", "layers")}

    # ---------------------------------------------------------------- what it can do

    @property
    def tp_sizes(self) -> dict[str, int]:
        """The sizes, by name, that a tensor-parallel degree must divide.

        The sequence length is among them, as boundary tensors are cut along their rows.
        """
        return {"sequence_length": self.sequence_length}

    def allows_tp(self, tp: int) -> bool:
        """Returns whether a tensor-parallel degree is possible."""
        return self.tp_problem(tp) is None

    def tp_problem(self, tp: int) -> str | None:
        """Says in a clause why a tensor-parallel degree cannot be; None: it can."""
        for name, size in self.tp_sizes.items():
            if size % tp:
                return f"tensor-parallel degree {tp} does not divide the model's {name} {size}"
        return None

    def tp_degrees(self, most: int) -> list[int]:
        """Returns the powers of two up to `most` that are possible degrees."""
        powers = (1 << bit for bit in range(most.bit_length()))
        return [tp for tp in powers if self.allows_tp(tp)]

    @classmethod
    def sequence_parallel_problem(cls) -> str | None:
        """Says in a clause why rows cannot be cut over a replica's ranks; None: they can."""
        return None

    def context_parallel_problem(self) -> str | None:
        """Says in a clause why sequences cannot be cut over a replica's ranks; None: they can."""
        return (
            f"sequences of family {self.family} cannot be cut over ranks; those of llama and of "
            "many of transformers' families can"
        )

    def token_slices_problem(self) -> str | None:
        """Says in a clause why a rank cannot run sequences slice by slice; None: it can."""
        return f"sequences of family {self.family} cannot run in slices"

    @property
    def expert_count(self) -> int:
        """The number of experts in a layer that has some; 0: none has."""
        return 0

    def is_of_experts(self, parameter: Parameter) -> bool:
        """Whether a parameter stacks those of a layer's experts, along its first dimension."""
        return False

    def is_expert_bias(self, parameter: Parameter) -> bool:
        """Whether a parameter trains without gradients, as the loads of experts move it.

        It is what a router adds to the scores that it chooses experts by.
        """
        return False

    def expert_parallel_problem(self) -> str | None:
        """Says in a clause why a layer's experts cannot lie over ranks; None: they can."""
        return f"model {self.name} of family {self.family} has no experts that could lie over ranks"

    def selective_recompute_problem(self) -> str | None:
        """Says in a clause why attention's scores cannot be computed again; None: they can."""
        return None

    @property
    def keeps_no_scores(self) -> bool:
        """Whether attention is one kernel of the chip in every block."""
        return False

    @property
    def fused_head_sizes(self) -> frozenset[tuple[int, int]]:
        """Sizes of a head's queries and keys, and of its values, in each kind of such a kernel."""
        return frozenset()

    @property
    def fuses_windows(self) -> bool:
        """Whether such a kernel looks through a window."""
        return False

    @property
    def caps_fused_scores(self) -> bool:
        """Whether such a kernel has a soft cap of its scores."""
        return False

    def documents_problem(self) -> str | None:
        """Says in a clause why attention cannot stay within a document of several; None: it can."""
        return None

    def mixed_lengths_problem(self) -> str | None:
        """Says in a clause why documents cannot go to several plans by length; None: they can."""
        return self.documents_problem()

    def training_problem(self) -> str | None:
        """Says in a clause why the model can be planned, but not trained; None: it can."""
        return None

    def allow_code(self, trust_remote_code: bool) -> None:  # noqa: B027
        """Lets this process run code that came with the model, where there is some.

        Raises ModelError where it is not trusted, or no longer what was planned.
        """

    def describe(self) -> str:
        """Returns a few words on the variant, such as "explicit attention, float32"."""
        return self.dtype

    @abstractmethod
    def flops_per_token(self) -> float:
        """Returns the FLOPs that a token's forward and backward take; recompute does not count."""

    @classmethod
    def hugging_face(cls) -> HuggingFaceFormat | None:
        """Returns the family's form as a Hugging Face folder; None: it has none."""
        return None

    # ---------------------------------------------------------------- what it is made of

    @abstractmethod
    def build(
        self,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        selective_recompute: bool = False,
        seed: int = 0,
        context: ContextParallelGroup | None = None,
        experts: ExpertParallelGroup | None = None,
    ) -> StageModule:
        """Returns blocks [first, last) as one rank of a tensor-parallel group holds them.

        The parameters are uninitialised. seed: that of dropout. context: the ranks over which
        sequences are cut; None: they are not. experts: the ranks over which a layer's experts lie;
        None: this one has all of them.
        """

    @abstractmethod
    def initial_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yields a stage's parameters, by their names in its module, whole and on the host.

        They depend on the seed, the global name and the full shape alone, never on the layout.
        """

    def base(self) -> ModelSpec:
        """Returns the model that a Hugging Face folder holds: without what is put beside it."""
        return self

    def added_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yields, of `initial_values`, those of a stage's parameters that are not the base's."""
        return iter(())

    # ---------------------------------------------------------------- checks

    def validate(self) -> None:
        """Raises ModelError, one sentence."""
        for name in ("layers", "hidden", "vocab", "sequence_length"):
            self._validate_size(name)

    def _validate_size(self, name: str) -> None:
        if not 1 <= getattr(self, name) <= LARGEST:
            raise ModelError(f"{name} is {getattr(self, name)}; expected 1 to {LARGEST}")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Self], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Reads and writes a model of any family where a file's type says ModelSpec."""
        from heteropp.models.families import any_family

        return any_family() if cls is ModelSpec else handler(source)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describes what the above reads, for editors."""
        from heteropp.models.families import schema_of_any

        return schema_of_any(handler) if cls is ModelSpec else handler(schema)
