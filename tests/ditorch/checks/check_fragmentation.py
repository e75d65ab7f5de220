"""Training on sentences of mixed lengths: how much more than its tensors the allocator holds,
beside what torch's CUDA allocator would by its rules."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

MIB = 1 << 20


class CudaRules:
    """The segments that torch's CUDA caching allocator would make, by its documented rules:
    requests are rounded to 512 bytes; those up to 1 MiB share segments of 2 MiB, those under
    10 MiB segments of 20 MiB, larger ones have segments of whole 2 MiB; the smallest free block
    that fits is cut, in segments of large ones only if more than 1 MiB is left; neighbours that
    are free are joined."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, start)
        self.size_at: dict[int, int] = {}
        self.before: dict[int, int | None] = {}
        self.after: dict[int, int | None] = {}
        self.next_start = 0

    def allocate(self, requested: int) -> int:
        size = -(-requested // 512) * 512
        small = size <= MIB
        free = self.free[small]
        found = bisect.bisect_left(free, (size, 0))
        if found < len(free):
            held, start = free.pop(found)
        else:
            held = self.segment_bytes(size)
            start = self.add_segment(held)
        rest = held - size
        if rest >= 512 if small else rest > MIB:
            held, cut = size, start + size
            self.before[cut], self.after[cut] = start, self.after[start]
            if (after := self.after[start]) is not None:
                self.before[after] = cut
            self.after[start], self.size_at[cut] = cut, rest
            bisect.insort(free, (rest, cut))
        self.size_at[start] = held
        return start

    def segment_bytes(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB

    def add_segment(self, size: int) -> int:
        start, self.next_start = self.next_start, self.next_start + size + 1
        self.reserved_bytes += size
        self.before[start] = self.after[start] = None
        return start

    def release(self, start: int, requested: int) -> None:
        free = self.free[-(-requested // 512) * 512 <= MIB]
        for left, right in ((start, self.after[start]), (self.before[start], start)):
            other = right if left == start else left
            if left is None or right is None or (self.size_at[other], other) not in free:
                continue
            free.remove((self.size_at[other], other))
            self.size_at[left] += self.size_at[right]
            self.after[left] = self.after[right]
            if (after := self.after[right]) is not None:
                self.before[after] = left
            start = left
        bisect.insort(free, (self.size_at[start], start))


def uniform(choice: random.Random) -> int:
    return choice.randint(64, 2048)


def multiple_of_256(choice: random.Random) -> int:
    return 256 * choice.randint(1, 8)


def constant(choice: random.Random) -> int:
    return 1024


Event = tuple[str, int, int]  # "+" or "-", which tensor, and its bytes
LAYERS = 6
WIDTH = 1024


def training(lengths: Callable[[random.Random], int], steps: int = 40) -> Iterator[Event]:
    """What a small decoder allocates and frees."""
    choice = random.Random(7)
    numbers = itertools.count()

    def tensors(*sizes: int) -> list[tuple[int, int]]:
        return [(next(numbers), size) for size in sizes]

    square = 4 * WIDTH * WIDTH
    layer_bytes = [square, square, square, square, 4 * square, 4 * square]
    weights = tensors(*LAYERS * layer_bytes)
    yield from (("+", *weight) for weight in weights)
    for step in range(steps):
        tokens = lengths(choice)
        activation = 4 * tokens * WIDTH
        kept = []
        for _ in range(LAYERS):
            layer = tensors(activation, 4 * tokens, 3 * activation, 8 * tokens**2, 4 * activation)
            for tensor, passing in zip(layer, tensors(*5 * [activation]), strict=True):
                yield from (("+", *tensor), ("+", *passing), ("-", *passing))
            kept.append(layer)
        gradients = []
        for _ in range(LAYERS):
            gradients += (layer := tensors(*layer_bytes))
            yield from (("+", *gradient) for gradient in layer)
            yield from (("-", *activation) for activation in kept.pop())
        if step == 0:  # the optimizer makes its states
            yield from (("+", *state) for state in tensors(*2 * LAYERS * layer_bytes))
        yield from (("-", *gradient) for gradient in gradients)


def peak_reserved_bytes(events: list[Event]) -> int:
    tensors = {}
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    for what, number, size in events:
        if what == "+":
            tensors[number] = torch.empty(size, dtype=torch.uint8, device="device")
        else:
            del tensors[number]
    return torch.accelerator.max_memory_reserved()


def peak_reserved_bytes_by_rules(events: list[Event]) -> int:
    rules = CudaRules()
    start_of = {}
    for what, number, size in events:
        if what == "+":
            start_of[number] = rules.allocate(size)
        else:
            rules.release(start_of.pop(number), size)
    return rules.reserved_bytes


@pytest.mark.parametrize("lengths", [uniform, multiple_of_256, constant])
def test_mixed_lengths_take_no_more_memory_than_on_cuda(
    lengths: Callable[[random.Random], int],
) -> None:
    events = list(training(lengths))
    assert peak_reserved_bytes(events) <= 1.05 * peak_reserved_bytes_by_rules(events)
