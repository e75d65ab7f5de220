"""What a stage's operators cost, counted by running the real stage module on the meta device.

The charging rule is that of csrc/ditorch/abi/runtime.h, which paces emulated chips: one launch an
ATen operator; bytes of every distinct tensor argument and result; 2*m*n*k flops for products of
matrices, and of the pairs that attention in one kernel sees, else one an element of the largest
tensor; views and allocations are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heteropp.cost.tracing.kind import Spread
from heteropp.cost.tracing.results import result_of
from heteropp.models.attention_work import backward_flops, forward_flops, seen_pairs
from heteropp.models.causal_attention import causal_inputs
from heteropp.models.fused_attention import capped_flash_attention
from heteropp.models.parallel.context_parallel import ContextParallelGroup
from heteropp.models.parallel.expert_parallel import Counts, UnderWay

ATTENTION = "_scaled_dot_product_attention"
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
# their tensor argument is a template, which they do not read
FILLS = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}


@dataclass(frozen=True)
class TracedOperator:
    name: str
    product: bool
    counts: tuple[int, ...]  # a product's flops, or its tensors' numbers of elements
    bytes: int
    # of a product of matrices [.., m, k] and [.., k, n]: how many, m, n, k; of an attention kernel
    # how many heads of all sequences, query and key tokens, the head's size; else empty
    sides: tuple[int, ...] = ()

    @property
    def flops(self) -> int:
        return max(self.counts, default=0)


@dataclass
class Trace:
    """The operators of a piece of a step, and the collectives between its tensor-parallel ranks."""

    operators: list[TracedOperator] = field(default_factory=list)
    all_reduce_bytes: list[int] = field(default_factory=list)
    gather_bytes: list[int] = field(default_factory=list)  # all-gathers and reduce-scatters
    # sent to other context-parallel ranks: the sender waits in each layer until it is there, and
    # the receiver where it is ahead
    exchange_bytes: list[int] = field(default_factory=list)
    peer_bytes: list[int] = field(default_factory=list)  # of that, the most to one of them
    # to or from ranks with other experts, of the rank that all of them wait for, and between two
    routed_bytes: list[int] = field(default_factory=list)
    routed_peer_bytes: list[int] = field(default_factory=list)
    # of an overlap: the most that a context-parallel rank sends until the last of it is here, and
    # of that, what comes here
    awaited_bytes: list[int] = field(default_factory=list)
    awaited_peer_bytes: list[int] = field(default_factory=list)
    # what runs while one exchange, or one routed message, is on its way: each has its operators and
    # the message, which are among those above as well
    overlaps: list[Trace] = field(default_factory=list)


class CountingGroup:
    """A tensor-parallel group of which this is rank 0, and the others are only counted."""

    index = 0

    def __init__(self, size: int, sequence_parallel: bool = False) -> None:
        self.size = size
        self.sequence_parallel = sequence_parallel
        self.trace = Trace()

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        self.trace.all_reduce_bytes.append(tensor.numel() * tensor.element_size())

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        self.trace.gather_bytes.append(output.numel() * output.element_size())

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        self.trace.gather_bytes.append(whole.numel() * whole.element_size())


class CountingContext(ContextParallelGroup):
    """A context-parallel group of which this is one rank, whose messages are only counted."""

    def __init__(self, group: CountingGroup, shares: Sequence[int], index: int) -> None:
        """group: the same rank's tensor-parallel group, which has the trace."""
        self.group, self.index = group, index
        self.parts = tuple(pairwise((0, *accumulate(shares))))

    def start(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        sent_bytes = [t.nbytes for t in sent.values()]
        message = Trace(exchange_bytes=[sum(sent_bytes)], peer_bytes=[max(sent_bytes, default=0)])
        self.group.trace.exchange_bytes += message.exchange_bytes
        self.group.trace.peer_bytes += message.peer_bytes
        awaited = [self._sent_by(peer, t.nbytes // t.shape[1]) for peer, t in received.items()]
        message.awaited_bytes.append(max(awaited, default=0))
        message.awaited_peer_bytes.append(max((t.nbytes for t in received.values()), default=0))
        return _overlapped(self.group.trace, message)

    def _sent_by(self, peer: int, token_bytes: int) -> int:
        """Returns the bytes that a peer sends to all ranks of which this is one: those after it, to
        which its own tokens go, or those before it, to which gradients of theirs go.
        """
        first, last = self.parts[peer]
        to_each = (last - first) * (len(self.parts) - 1 - peer)
        return token_bytes * (to_each if peer < self.index else first)


class CountingExperts:
    """Ranks over which experts lie, of which this is one, and whose messages are only counted."""

    def __init__(self, group: CountingGroup, spread: Spread) -> None:
        """group: the same rank's tensor-parallel group, which has the trace."""
        self.group, self.spread, self.index = group, spread, 0
        self.parts = tuple(pairwise((0, *accumulate(spread.shares))))

    def counts(self, chosen: Tensor, experts: int, layer: int) -> Counts:
        size_bytes = experts * chosen.element_size()
        self._charge((len(self.parts) - 1) * size_bytes, size_bytes)
        own = self.spread.rows[0]
        rows = [-(-len(chosen) * each // own) for each in self.spread.rows]
        # by rank: the rows that it sends each other one
        sent = [
            [n * share // experts if i != j else 0 for j, share in enumerate(self.spread.shares)]
            for i, n in enumerate(rows)
        ]
        self.busiest = max(*map(sum, sent), *map(sum, zip(*sent, strict=True)))
        self.most_to_peer = max(map(max, sent))
        # of each rank's rows, those that come here are rounded up: memory must have room for them
        ends = [[(n * i - 1) // experts for i in range(experts + 1)] for n in rows]
        return [[b - a for a, b in pairwise(of_rank)] for of_rank in ends]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """All wait for the rank that sends or receives most, whichever way rows go."""
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        self._charge(self.busiest * row_bytes, self.most_to_peer * row_bytes)
        return rows.new_empty(sum(received), *rows.shape[1:])

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> UnderWay:
        trace = self.group.trace
        coming = self.all_to_all(rows, sent, received)
        message = Trace(
            routed_bytes=trace.routed_bytes[-1:], routed_peer_bytes=trace.routed_peer_bytes[-1:]
        )
        return UnderWay(rows, coming, _overlapped(trace, message))

    def _charge(self, all_bytes: int, to_peer_bytes: int) -> None:
        self.group.trace.routed_bytes.append(all_bytes)
        self.group.trace.routed_peer_bytes.append(to_peer_bytes)


def _overlapped(trace: Trace, message: Trace) -> Callable[[], None]:
    """Returns what ends a message's way, during which operators are added to the trace."""
    first = len(trace.operators)

    def wait() -> None:
        if beside := trace.operators[first:]:
            trace.overlaps.append(replace(message, operators=beside))

    return wait


class _Counter(TorchDispatchMode):
    def __init__(self, trace: Trace, held: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.trace, self.held = trace, held

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler to do so, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and self._accumulates(args):
            func = torch.ops.aten.add_.Tensor
        elif func is torch.ops.aten.roll.default:
            # but on meta, PyTorch rolls by concatenating, which tells the strides of the result
            func, args, kwargs = torch.ops.aten.cat.default, ([args[0]], -1), {}
        result = result_of(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if name == "_flash_attention_backward":
            self.trace.operators.append(_charge_flash_backward(args, result))
        elif not func.is_view and name not in FREE and _on_chip(result):
            if name == "masked_fill":  # PyTorch makes it of two, on every device but meta
                self.trace.operators.append(_charge("clone", args[:1], {}, result))
                name, args = "masked_fill_", (result, *args[1:])
            charged = result
            if name == "slice_backward":  # and this, too
                self.trace.operators.append(_charge("new_zeros", (), {}, result))
                name, args, charged = "copy_", args[:1], torch.empty_like(args[0])
            self.trace.operators.append(_charge(name, args, kwargs or {}, charged))
        return result

    def _accumulates(self, args: Any) -> bool:
        """Whether this adds up gradients, which autograd does in place unless a mode looks on.

        Not into one that others hold too, as the one that the backward began with.
        """
        node = torch._C._current_autograd_node()
        recomputes = torch.is_grad_enabled()  # a forward inside a backward
        return node is not None and not recomputes and not self.held(args[0])


def _on_chip(result: Any) -> bool:
    leaves = tree_leaves(result)
    return any(isinstance(leaf, Tensor) and leaf.device.type == "meta" for leaf in leaves)


def _charge(name: str, args: Any, kwargs: Any, result: Any) -> TracedOperator:
    touched = result if name in FILLS else (args, kwargs, result)
    leaves = [leaf for leaf in tree_leaves(touched) if isinstance(leaf, Tensor)]
    tensors = list({id(leaf): leaf for leaf in leaves}.values())
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if name in PRODUCTS:
        left = args[1] if name in ("addmm", "baddbmm") else args[0]
        right = args[2] if name in ("addmm", "baddbmm") else args[1]
        flops = 2 * left.numel() * right.shape[-1]
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        sides = (left.numel() // (m * k), m, n, k) if left.numel() else ()  # of an expert's no rows
        return TracedOperator(name, True, (flops,), moved, sides)
    return TracedOperator(name, False, tuple(tensor.numel() for tensor in tensors), moved)


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as chips run it: one kernel forward, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, traces: list[Trace]) -> Tensor:
        # half-precision norms keep their scale in float32
        wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
        scale = x.new_empty(x.shape[:-1], dtype=wide)
        ctx.save_for_backward(x, weight, scale)
        ctx.traces = traces
        out = torch.empty_like(x)
        traces[-1].operators.append(_charge("_fused_rms_norm", (x, weight), {}, (out, scale)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        of_input, of_weight = torch.empty_like(saved[0]), torch.empty_like(saved[1])
        results = (of_input, of_weight if ctx.needs_input_grad[1] else None)
        charge = _charge("_fused_rms_norm_backward", (gradient, *saved), {}, results)
        ctx.traces[-1].operators.append(charge)
        return *results, None


class _FusedAttention(torch.autograd.Function):
    """Attention as one kernel, of [sequences, heads, length, size]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pairs: int,
        traces: list[Trace],
    ) -> tuple[Tensor, Tensor]:
        """pairs: of a query and a key that it sees, of a head in one sequence."""
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            rows = out.transpose(1, 2).shape[:-1]  # heads lie next to each other in a row
            out = query.new_empty(*rows, value.shape[-1]).transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:-1], dtype=wide)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.traces, ctx.pairs = traces, pairs
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)  # zeros for the sums, which no chip makes
        tensors = query, key, value, out, sums
        charge = _charge_attention(ATTENTION, forward_flops, pairs, tensors, ())
        traces[-1].operators.append(charge)
        return out, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        results = tuple(torch.empty_like(each) for each in saved[:3])
        name, beside = f"{ATTENTION}_backward", (gradient, *results)
        charge = _charge_attention(name, backward_flops, ctx.pairs, saved, beside)
        ctx.traces[-1].operators.append(charge)
        return *results, None, None


def _charge_flash_backward(args: Sequence[Any], results: Sequence[Tensor]) -> TracedOperator:
    """Returns what a backward is charged that a forward's own asks for by its name in ATen."""
    gradient, query, key, value, mixed = (each.transpose(1, 2) for each in args[:5])
    pairs = _flash_pairs(query, key, args[11], None)
    tensors = query, key, value, mixed, args[5]
    name, beside = f"{ATTENTION}_backward", (gradient, *results)
    return _charge_attention(name, backward_flops, pairs, tensors, beside)


def _charge_attention(
    name: str,
    flops_of: Callable[[int, int, int], int],
    pairs: int,
    tensors: tuple[Tensor, ...],
    beside: tuple[Tensor, ...],
) -> TracedOperator:
    """Returns what a kernel is charged for so many pairs of a head in one sequence.

    tensors: the query, the key, the value and others that it touches, as `beside` are."""
    query, key, value = tensors[:3]
    (queries, size), length = query.shape[-2:], key.shape[-2]
    heads = query.numel() // (queries * size)  # of all sequences
    flops = flops_of(heads * pairs, size, value.shape[-1])
    moved = sum(t.numel() * t.element_size() for t in (*tensors, *beside))
    return TracedOperator(name, True, (flops,), moved, (heads, queries, length, size))


class _ChipKernels(TorchFunctionMode):
    """Counts RMSNorm and attention as one operator each, as a chip runs them.

    On meta tensors PyTorch would run them as several operators.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.rms_norm and kwargs.get("weight") is not None:
            return _FusedNorm.apply(args[0], kwargs["weight"], _active)
        if (inputs := causal_inputs(func, args, kwargs)) is not None:
            return _FusedAttention.apply(*inputs, seen_pairs(inputs[0].shape[-2]), _active)[0]
        if func in (torch.ops.aten._flash_attention_forward, capped_flash_attention):
            query, key, value = (each.transpose(1, 2) for each in args[:3])
            pairs = _flash_pairs(query, key, args[8], kwargs.get("window_size_left"))
            mixed, sums = _FusedAttention.apply(query, key, value, pairs, _active)
            none = query.new_empty(0)
            return mixed.transpose(1, 2), sums, none, none, none
        return func(*args, **kwargs)


def _flash_pairs(query: Tensor, key: Tensor, causal: bool, left: int | None) -> int:
    """left: how many keys before its own a query sees; None: all."""
    queries, length = query.shape[-2], key.shape[-2]
    if not causal:
        return queries * length
    return seen_pairs(length, None if left is None else left + 1, queries)


_active: list[Trace] = []


def count(
    trace: Trace, run: Callable[[], Any], held: Callable[[Tensor], bool] = lambda _: False
) -> Any:
    """Runs something on meta tensors and adds its operators to a trace.

    held: whether somebody beside autograd holds a gradient.
    """
    _active.append(trace)
    try:
        with _ChipKernels(), _Counter(trace, held):
            return run()
    finally:
        _active.pop()
