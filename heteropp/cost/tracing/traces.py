"""What small stages cost, as traced once and then kept: operators, messages and tensors.

The truth is the real stage module, run on meta tensors (stage.py), which needs torch. A stage with
one sequence in its micro-batch is traced as it is. With more, every size is affine in the number of
sequences, so that two traces, of 2 and 3, tell all; some operators are others with one. Where
experts lie over ranks, sequences are counted by as many as make other ranks' rows whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from heteropp.cost.tracing import cache as trace_cache
from heteropp.cost.tracing.kind import PIECES, StageKind
from heteropp.models.spec import BlockCounts, ModelSpec

if TYPE_CHECKING:
    from heteropp.cost.tracing.operators import Trace
    from heteropp.cost.tracing.stage import Recording

GRANULARITY_BYTES = 512  # device allocators round up to this

Size = tuple[int, int]  # a constant part, and a part for each sequence
Shares = tuple[tuple[str, float], ...]  # kinds of blocks, and the share of the blocks that each is
Entry = dict[str, Any]  # of the cache: a traced stage, its sizes still in terms of sequences


# between the ranks of a replica, and between those over which experts lie
MESSAGES = (
    *("all_reduces", "gathers", "exchanges", "of_peers", "routed", "routed_to_peers"),
    *("awaited", "awaited_of_peers"),
)
ATTENTION = {
    "_scaled_dot_product_attention": "attention",
    "_scaled_dot_product_attention_backward": "attention_backward",
}


@dataclass(frozen=True)
class TracedProduct:
    """Products of matrices, or attention kernels, all of one shape."""

    number: int
    kind: Literal["product", "attention", "attention_backward"]
    flops: int  # of each
    bytes: int
    sides: tuple[int, ...]  # see TracedOperator


@dataclass(frozen=True)
class TracedPiece:
    """A piece of a step: its operators, like ones together, and tensor-parallel collectives."""

    operators: tuple[tuple[int, bool, int, int], ...]  # how many, product or not, flops, bytes
    products: tuple[TracedProduct, ...]  # of those, by shape
    all_reduce_bytes: tuple[tuple[int, int], ...]  # how many, bytes
    gather_bytes: tuple[tuple[int, int], ...]  # all-gathers and reduce-scatters, the same
    exchange_bytes: tuple[tuple[int, int], ...] = ()  # to context-parallel ranks, the same
    peer_bytes: tuple[tuple[int, int], ...] = ()  # of that, the most to one of them
    routed_bytes: tuple[tuple[int, int], ...] = ()  # between ranks with other experts, the same
    routed_peer_bytes: tuple[tuple[int, int], ...] = ()  # of that, the most between two of them
    awaited_bytes: tuple[tuple[int, int], ...] = ()  # of an overlap, see Trace
    awaited_peer_bytes: tuple[tuple[int, int], ...] = ()
    # what of all that runs while one exchange or one routed message is on its way
    overlaps: tuple[TracedPiece, ...] = ()


@dataclass(frozen=True, eq=False)
class StageTrace:
    """The work and memory of a stage, as traced.

    Bytes are those of one rank and one micro-batch, rounded as device allocators round.
    """

    forward: TracedPiece
    # the gradient of the stage's input, which the stage before waits for
    backward_input: TracedPiece
    backward_weight: TracedPiece  # the rest of the backward: the gradients of weight matrices
    norm: TracedPiece  # of every parameter's gradient
    # clipping, and all of the optimizer that looks at each element alone; zeroing the gradients
    update: TracedPiece
    orthogonal: TracedPiece  # Muon's other part: making each hidden matrix orthogonal
    # of experts that lie over ranks: the norms of their gradients, and their update
    expert_norm: TracedPiece
    expert_update: TracedPiece
    flat_bytes: int  # of the flat parameter buffer
    training_bytes: int  # of its part that trains, which replicas gather
    gradient_bytes: int  # of the flat gradient buffer
    expert_training_bytes: int  # the same two of experts that lie over ranks, which are not in it
    expert_gradient_bytes: int
    constant_bytes: int
    input_bytes: int  # activations; tokens are held by the step, not by the micro-batch
    output_bytes: int  # activations; the loss of the last stage
    kept_bytes: int  # alive after a forward, its input included
    forward_peak_bytes: int  # most alive during a forward, beyond what stood before it
    backward_input_peak_bytes: int  # the same during a backward's first half, or all of it
    backward_weight_peak_bytes: int  # the same during its second half, the put off included
    update_peak_bytes: int  # the same during the update of each element
    expert_update_peak_bytes: int  # the same during that of experts that lie over ranks
    orthogonal_peak_bytes: int  # the same while matrices are made orthogonal, one after another
    matrix_bytes: int  # of hidden matrices, in the flat buffer of the optimizer's averages
    matrices: int  # that Muon updates
    put_off_bytes: int  # held between the two halves of a backward
    parts_bytes: int  # of gradients that the tensor-parallel ranks have yet to sum
    between_slices_bytes: int  # keys and values of a micro-batch that runs in slices


def trace_stage(model: ModelSpec, kind: StageKind, layers: int) -> StageTrace:
    """Returns the trace of a stage of a few layers.

    It is traced, which needs torch, unless that was done before on this machine.
    """
    unit = 1
    if kind.spread is not None:  # other ranks' rows are so many times these, a whole number
        own = kind.spread.rows[0]
        unit = own if kind.sequences % own == 0 else 1
    counts = (2 * unit, 3 * unit) if kind.sequences > unit else (unit,)
    if kind.sliced:
        kind = kind.with_slice_alone
    key = f"layers={layers} {replace(kind, sequences=counts[0])}"
    if kind.spread is not None:
        key += f" of {counts}"  # by one of which it would not be known what the unit was

    def trace() -> Entry:
        from heteropp.cost.tracing.slices import record_slice
        from heteropp.cost.tracing.stage import record_stage

        record = record_slice if kind.sliced else record_stage
        return outline([record(model, layers, replace(kind, sequences=n)) for n in counts])

    return trace_cache.get(model, key, trace, lambda entry: at(entry, kind.sequences // unit))


@dataclass(frozen=True, eq=False)
class BlockTraces:
    """Stages of one and of two blocks of one kind, and the share of the blocks that are such.

    Each is traced where it is asked for.
    """

    share: float
    traced: Callable[[int], StageTrace]  # by the number of blocks

    @cached_property
    def one(self) -> StageTrace:
        return self.traced(1)

    @cached_property
    def two(self) -> StageTrace:
        return self.traced(2)

    def more(self, what: Callable[[StageTrace], int]) -> int:
        """Returns what each further block adds to a figure."""
        return what(self.two) - what(self.one)

    def more_waiting(self) -> int:
        """Returns the most bytes of each further block while another one is at work."""
        one, two = self.one, self.two
        kept = two.kept_bytes - one.kept_bytes
        return max(kept, two.put_off_bytes - one.put_off_bytes)


@dataclass(frozen=True, eq=False)
class StageTraces:
    """Stages of one and of two blocks of each kind, which tell what any number of blocks costs."""

    kinds: tuple[BlockTraces, ...]

    @property
    def one(self) -> StageTrace:
        """A stage of one block, for what does not depend on its blocks."""
        return self.kinds[0].one

    def of(self, layers: int, what: Callable[[StageTrace], int]) -> int:
        """Returns a figure that is affine in the blocks, for so many of them."""
        first = self.kinds[0]
        if len(self.kinds) == 1:
            one = what(first.one)
            return one + (layers - 1) * (what(first.two) - one)
        more = sum(layers * kind.share * kind.more(what) for kind in self.kinds)
        return what(first.one) - first.more(what) + round(more)

    def most(self, what: Callable[[StageTrace], int]) -> int:
        """Returns the largest of a figure that is one block's, whatever the blocks."""
        return max(what(kind.one) for kind in self.kinds)

    def peak(self, layers: int, what: Callable[[StageTrace], int]) -> int:
        """Returns an upper bound of a peak for so many blocks.

        A peak is affine in the blocks too, except that long stages may peak at another moment than
        short ones. At that moment they hold what a forward keeps of each block, or what its
        backward has put off, so that each adds at most the largest of these slopes. Of blocks of
        another kind than the one at work nothing else is there.
        """
        return max(self._peak(at_work, layers, what) for at_work in self.kinds)

    def _peak(self, at_work: BlockTraces, layers: int, what: Callable[[StageTrace], int]) -> int:
        others = sum(
            layers * kind.share * kind.more_waiting() for kind in self.kinds if kind is not at_work
        )
        alike = layers * at_work.share - 1 if len(self.kinds) > 1 else layers - 1
        slope = max(at_work.more(what), at_work.more_waiting())
        return what(at_work.one) + round(alike * slope + others)


@lru_cache(maxsize=4096)
def trace_stages(model: ModelSpec, kind: StageKind, blocks: BlockCounts = ()) -> StageTraces:
    """Returns the traces of a kind of stage, whose `block` is not looked at.

    blocks: how many it has of each kind; empty: they are mixed as in the whole model.
    """
    blocks = blocks or model.block_counts([(0, model.layers)])
    total = sum(count for _, count in blocks)
    return _trace_stages(model, kind, tuple((block, count / total) for block, count in blocks))


@lru_cache(maxsize=4096)  # stages with the same shares have the same traces, whatever their blocks
def _trace_stages(model: ModelSpec, kind: StageKind, shares: Shares) -> StageTraces:
    return StageTraces(
        tuple(
            BlockTraces(share, partial(trace_stage, model, replace(kind, block=block)))
            for block, share in shares
        )
    )


def outline(recordings: Sequence[Recording]) -> Entry:
    """Returns what a stage costs, from its recording with 1 sequence, or those with 2 and 3."""

    def size(values: Iterable[int]) -> Size:
        two, *three = values
        step = three[0] - two if three else 0
        return two - 2 * step, step

    traces = {name: [r.pieces[name] for r in recordings] for name in recordings[0].pieces}
    overlaps = {
        _overlap(name, i): alike
        for name, of_piece in traces.items()
        for i, alike in enumerate(zip(*(trace.overlaps for trace in of_piece), strict=True))
    }
    pieces = {name: _outline_piece(each, size) for name, each in {**traces, **overlaps}.items()}
    if len({tuple(recording.events) for recording in recordings}) != 1:
        raise RuntimeError("a stage's tensors come and go otherwise with 3 sequences than with 2")
    tensors = [size(of) for of in zip(*(r.tensors_bytes for r in recordings), strict=True)]
    events, spans = recordings[0].events, recordings[0].spans
    kept, forward = _alive(tensors, events, spans["forward"], Counter())
    standing, backward = _alive(tensors, events, spans["backward_input"], kept)
    _, weights = _alive(tensors, events, spans["backward_weight"], standing)
    _, update = _alive(tensors, events, spans["update"])
    _, expert_update = _alive(tensors, events, spans["expert_update"])
    _, orthogonal = _alive(tensors, events, spans["orthogonal"])
    return {
        "operators": {
            name: [
                [number, int(product), *bytes_, *chain(*flops)]
                for number, (product, flops, bytes_) in _counted(operators)
            ]
            for name, (operators, *_) in pieces.items()
        },
        "products": {
            name: [
                [number, kind, [*flops], [*bytes_], [[*side] for side in sides]]
                for number, (kind, flops, bytes_, sides) in _counted(products)
            ]
            for name, (_, products, *_) in pieces.items()
        },
        **{
            what: {name: _rows(piece[2 + i]) for name, piece in pieces.items()}
            for i, what in enumerate(MESSAGES)
        },
        "overlaps": {name: len(of_piece[0].overlaps) for name, of_piece in traces.items()},
        "sizes": {
            name: size(r.sizes_bytes[name] for r in recordings)
            for name in recordings[0].sizes_bytes
        },
        "kept": _rows(_merge(kept)),
        "forward_peaks": _peaks(forward),
        "backward_input_peaks": _peaks(backward),
        "backward_weight_peaks": _peaks(weights),
        "update_peaks": _peaks(update),
        "expert_update_peaks": _peaks(expert_update),
        "orthogonal_peaks": _peaks(orthogonal),
    }


def _overlap(piece: str, i: int) -> str:
    """Returns the name of a piece's overlap, as of a piece of its own."""
    return f"{piece} overlap {i}"


def _outline_piece(
    traces: Sequence[Trace], size: Callable[[Iterable[int]], Size]
) -> tuple[Counter, ...]:
    """Counts operators as (product, counts, bytes), those with sides as (kind, flops, bytes,
    sides), and each kind of MESSAGES as bytes.
    """
    operators: Counter = Counter()
    products: Counter = Counter()
    for alike in zip(*(trace.operators for trace in traces), strict=True):
        if len({(op.name, op.product, len(op.counts)) for op in alike}) != 1:
            raise RuntimeError(f"{alike[0].name} is {alike[1].name} with 3 sequences")
        counts = {size(of) for of in zip(*(op.counts for op in alike), strict=True)}
        largest = tuple(sorted(c for c in counts if not any(_exceeds(d, c) for d in counts)))
        moved = size(op.bytes for op in alike)
        operators[alike[0].product, largest, moved] += 1
        if alike[0].sides:
            sides = tuple(size(of) for of in zip(*(op.sides for op in alike), strict=True))
            products[ATTENTION.get(alike[0].name, "product"), largest[0], moved, sides] += 1
    messages = (
        [trace.all_reduce_bytes for trace in traces],
        [trace.gather_bytes for trace in traces],
        [trace.exchange_bytes for trace in traces],
        [trace.peer_bytes for trace in traces],
        [trace.routed_bytes for trace in traces],
        [trace.routed_peer_bytes for trace in traces],
        [trace.awaited_bytes for trace in traces],
        [trace.awaited_peer_bytes for trace in traces],
    )
    counted = (Counter(map(size, zip(*each, strict=True))) for each in messages)
    return operators, products, *counted


def _exceeds(a: Size, b: Size) -> bool:
    """Whether a is the larger with any number of sequences."""
    return a != b and a[0] >= b[0] and a[1] >= b[1]


def _alive(
    tensors: list[Size], events: list[int], span: tuple[int, int], before: Counter | None = None
) -> tuple[Counter, list[Counter]]:
    """Returns the tensors alive at a span's end, and at each moment when they may peak.

    before: those alive at its begin; when None, only what is born in the span counts.
    """
    alive, born = Counter(before or ()), set(events[: span[0]] if before is not None else ())
    states = [Counter(alive)]
    for event in events[slice(*span)]:
        if event >= 0:
            born.add(event)
            alive[tensors[event]] += 1
        elif ~event in born:
            states.append(+alive)
            alive[tensors[~event]] -= 1
    return +alive, [*states, +alive]


def _merge(state: Counter) -> Counter:
    """Returns the same bytes as fewer tensors: those that need no rounding become one."""
    merged: Counter = Counter()
    constant = each = 0
    for (own_constant, own_each), number in state.items():
        if own_each == 0:
            own_constant = _round(own_constant)
        if own_constant % GRANULARITY_BYTES or own_each % GRANULARITY_BYTES:
            merged[own_constant, own_each] += number
        else:
            constant, each = constant + number * own_constant, each + number * own_each
    merged[constant, each] += 1
    return merged


def _round(size_bytes: int) -> int:
    return -(-size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES


def _peaks(states: list[Counter]) -> list:
    """Returns the states, as rows, that may be the largest with some number of sequences."""
    kept: list[Counter] = []
    for state in map(_merge, states):
        if not any(_holds(other, state) for other in kept):
            kept = [other for other in kept if not _holds(state, other)] + [state]
    return [_rows(state) for state in kept]


def _holds(larger: Counter, smaller: Counter) -> bool:
    """Whether one state has at least another's bytes: for each tensor one no smaller."""
    sizes = sorted(larger.elements(), reverse=True)
    for size in sorted(smaller.elements(), reverse=True):
        found = next((s for s in sizes if s == size or _exceeds(s, size)), None)
        if found is None:
            return False
        sizes.remove(found)
    return True


def _counted(counted: Counter) -> list:
    """Returns (how many, what), in the order of what is counted."""
    return [(number, what) for what, number in sorted(counted.items())]


def _rows(counted: Counter) -> list:
    return [[number, *size] for number, size in _counted(counted)]


def at(entry: Entry, sequences: int) -> StageTrace:
    """Returns a traced stage with a number of sequences in its micro-batch."""

    def rounded(rows: Iterable) -> int:
        return sum(number * _round(constant + each * sequences) for number, constant, each in rows)

    def peak(name: str) -> int:
        return max(map(rounded, entry[name]))

    sizes = {
        name: int(constant + each * sequences) for name, (constant, each) in entry["sizes"].items()
    }
    return StageTrace(
        **{name: _piece_at(entry, name, sequences) for name in PIECES},
        flat_bytes=sizes["flat"],
        training_bytes=sizes["training"],
        gradient_bytes=sizes["gradient"],
        expert_training_bytes=sizes["expert_training"],
        expert_gradient_bytes=sizes["expert_gradient"],
        constant_bytes=sizes["constant"],
        input_bytes=sizes["input"],
        output_bytes=sizes["output"],
        kept_bytes=rounded(entry["kept"]),
        forward_peak_bytes=peak("forward_peaks"),
        backward_input_peak_bytes=peak("backward_input_peaks") + sizes["second_gradient"],
        backward_weight_peak_bytes=peak("backward_weight_peaks") + sizes["second_gradient"],
        update_peak_bytes=peak("update_peaks"),
        expert_update_peak_bytes=peak("expert_update_peaks"),
        orthogonal_peak_bytes=peak("orthogonal_peaks"),
        matrix_bytes=sizes["matrix"],
        matrices=sizes["matrices"],
        put_off_bytes=sizes["put_off"],
        parts_bytes=sizes["parts"],
        between_slices_bytes=sizes["between_slices"],
    )


def _piece_at(entry: Entry, name: str, sequences: int) -> TracedPiece:
    def size(of: Size) -> int:
        return of[0] + of[1] * sequences

    last: list[Any] = [
        tuple((n, constant + each * sequences) for n, constant, each in entry[what][name])
        for what in MESSAGES
    ]
    overlaps = range(entry["overlaps"].get(name, 0))
    last.append(tuple(_piece_at(entry, _overlap(name, i), sequences) for i in overlaps))
    return TracedPiece(
        tuple(
            (row[0], row[1] == 1, _largest(row, sequences), row[2] + row[3] * sequences)
            for row in entry["operators"][name]
        ),
        tuple(
            TracedProduct(number, kind, size(flops), size(moved), tuple(map(size, sides)))
            for number, kind, flops, moved, sides in entry["products"][name]
        ),
        *last,
    )


def _largest(row: list[int], sequences: int) -> int:
    if len(row) == 6:
        return row[4] + row[5] * sequences
    return max(row[i] + row[i + 1] * sequences for i in range(4, len(row), 2))
