"""Capture: what every operator was given and gave, as files that outlive the run.

    with Capture(output=Path("runs/gpu")) as capture:
        train()

Statistics are always kept, tensors on demand. Two captures of one program, taken on two chips in
processes that never meet, are compared by `depart`; `replay` runs captured calls again on this
process's chip.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Container, Iterable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack, get_args
from zlib import crc32

import torch
from torch import Tensor, distributed

import ditorch
from ditorch.precision import place, tensors
from ditorch.precision.call import Call
from ditorch.precision.captures.arguments import to_json
from ditorch.precision.captures.records import CallRecord, Manifest, TensorUse
from ditorch.precision.captures.statistics import digest_of, dtype_name, on_host, statistics_of
from ditorch.precision.captures.store import SMALLEST_BUDGET_BYTES, Existing, Store
from ditorch.precision.place import Place
from ditorch.precision.results import Findings, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.tool import Proceed, Tool

_MESSAGE = re.compile(r"c10d\.(send|recv|.*barrier|check_for_nan)")
_WAIT = re.compile(r"_c10d_functional\.wait_tensor\b")
_MANY_NAMES = 512  # characters of a selection that a manifest repeats


class Capture(Tool):
    """Keeps statistics of what the selected operators were given and gave, and tensors on demand.

    It writes `<output>/rank<r>/step<s>.*` (see records.py) as each step ends.

    Args:
        output: The folder of the capture; ranks share it, runs do not.
        tensors: Which tensors are kept beside their statistics; "all" is needed to replay.
        budget_bytes: Most bytes a rank may have on disk; what had no room is in the manifest.
        every: Captures one call in so many, the same ones in every run of the program.
        every_steps: Captures one step in so many, the first among them.
        existing: What to do if the folder has this rank's capture already; "resume" keeps the
            steps that are there and adds others.
    """

    rank_in_line: ClassVar[int] = 10

    def __init__(
        self,
        *,
        output: Path,
        tensors: Literal["none", "outputs", "all"] = "none",
        budget_bytes: int = 1 << 30,
        every: int = 1,
        every_steps: int = 1,
        existing: Existing = "refuse",
        **selection: Unpack[Selection],
    ) -> None:
        """Raises ValueError: an argument is out of range."""
        super().__init__(**selection)
        if budget_bytes < SMALLEST_BUDGET_BYTES:
            raise ValueError(
                f"budget_bytes is {budget_bytes}, expected at least {SMALLEST_BUDGET_BYTES}"
            )
        for name, value in {"every": every, "every_steps": every_steps}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        choices = {"tensors": (tensors, ("none", "outputs", "all")),
                   "existing": (existing, get_args(Existing))}  # fmt: skip
        for name, (chosen, known) in choices.items():
            if chosen not in known:
                raise ValueError(f"{name} is {chosen!r}, expected one of {', '.join(known)}")
        self.output = Path(output)
        self.tensors = tensors
        self.budget_bytes = budget_bytes
        self.every = every
        self.every_steps = every_steps
        self.existing: Existing = existing
        self._selection = {name: str(value)[:_MANY_NAMES] for name, value in selection.items()}
        self._store: Store | None = None
        self._step = 0
        self._lock = threading.Lock()

    def opened(self) -> None:
        self._store = None
        # A process started by multiprocessing learns its rank later, with its process group.
        if "RANK" in os.environ or distributed.is_initialized() or parent_process() is None:
            self._store = self._open_store(place.rank())

    def closed(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.finish_step(self._step)
        if self._store is not None:
            write_findings(self.findings(), self.output)

    def around(self, call: Call, proceed: Proceed) -> Any:
        if not self._is_due(call):
            return proceed(call)
        given: list[Tensor] = []
        arguments = [to_json(value, given) for value in call.args]
        named = [each.name for each in call.func._schema.arguments if each.name in call.kwargs]
        keywords = {name: to_json(call.kwargs[name], given) for name in named}
        read = {name for name, _ in tensors.read_tensors(call)}
        names = [name for name, _ in tensors.inputs(call)]
        inputs = self._record(call, zip(names, given, strict=True), read, self.tensors == "all")
        result = proceed(call)
        results = outputs_of(call, result)
        outputs = self._record(call, results, dict(results), self.tensors != "none")
        where = call.place
        record = CallRecord(
            phase=where.phase, module=where.module, operator=where.operator, index=where.index,
            function=where.function, source=where.source, arguments=arguments, keywords=keywords,
            inputs=inputs, outputs=outputs,
        )  # fmt: skip
        with self._lock:
            self._store_at(where).add_call(record)
        return result

    def findings(self) -> Findings:
        """How much was captured, and what the budget left out."""
        with self._lock:
            if self._store is None:
                return Findings(tool="capture", summary="no call was captured")
            manifest, steps = self._store.manifest, self._store.steps
        return Findings(
            tool="capture",
            rank=manifest.rank,
            device=manifest.device,
            chip=manifest.chip,
            steps=steps,
            summary=f"captured {steps} steps; {manifest.used_bytes} bytes are on disk",
            notes=manifest.left_out.notes(),
        )

    def _is_due(self, call: Call) -> bool:
        where = call.place
        if where.step % self.every_steps or not _is_worth_it(call):
            return False
        if self.every > 1:
            name = f"{where.step} {where.phase} {where.module} {where.operator} {where.index}"
            if crc32(name.encode()) % self.every:
                return False
        return not (self._store is not None and self._store.has_step(where.step))

    def _record(
        self, call: Call, named: Iterable[tuple[str, Tensor]], read: Container[str], keep: bool
    ) -> list[TensorUse]:
        with self._lock:
            return _uses(self._store_at(call.place), list(named), read, keep)

    def _store_at(self, where: Place) -> Store:
        """The rank's store, its earlier step finished."""
        if self._store is None:
            self._store = self._open_store(where.rank)
        if where.step != self._step:
            self._store.finish_step(self._step)
            self._step = where.step
        return self._store

    def _open_store(self, rank: int) -> Store:
        chip = ditorch.chip()
        manifest = Manifest(
            rank=rank,
            world_size=_world_size(),
            device=str(ditorch.device),
            chip=f"{chip.vendor}, {chip.chip_type}",
            torch=torch.__version__,
            tensors=self.tensors,
            every=self.every,
            every_steps=self.every_steps,
            selection=self._selection,
            budget_bytes=self.budget_bytes,
        )
        return Store(self.output, manifest, self.existing)


def _uses(
    store: Store, named: list[tuple[str, Tensor]], read: Container[str], keep: bool
) -> list[TensorUse]:
    wanted = [tensor for name, tensor in named if name in read and _is_readable(tensor)]
    hosts = dict(zip(map(id, wanted), on_host(wanted), strict=True))
    return [_use(store, name, tensor, hosts.get(id(tensor)), keep) for name, tensor in named]


def _use(store: Store, name: str, tensor: Tensor, host: Tensor | None, keep: bool) -> TensorUse:
    digest = ""
    if host is not None:
        digest = digest_of(host)
        if not store.knows(digest):
            store.add_statistics(statistics_of(host, digest))
        if keep:
            store.keep(digest, host)
    return TensorUse(
        name=name,
        digest=digest,
        dtype=dtype_name(tensor.dtype),
        shape=list(tensor.shape),
        device=str(tensor.device),
        strides=None if host is None or tensor.is_contiguous() else list(tensor.stride()),
    )


def _is_readable(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def outputs_of(call: Call, result: Any) -> list[tuple[str, Tensor]]:
    """Arguments the call writes by their names, then results that are not among them."""
    _wait_for_collective(call, result)
    written = tensors.written_tensors(call)
    known = {id(tensor) for _, tensor in written}
    results = tensors.named_tensors(result, "out")
    return written + [(name, each) for name, each in results if id(each) not in known]


def _wait_for_collective(call: Call, result: Any) -> None:
    """A collective's results are there once its work is done."""
    if call.func.namespace == "c10d":
        last = result[-1] if isinstance(result, (list, tuple)) else result
        torch._C._distributed_c10d.Work.unbox(last).wait()


def _is_worth_it(call: Call) -> bool:
    """Whether the call computes tensors that are there when it returns.

    Messages are not: to wait for one may be to wait for what this rank is about to post.
    """
    is_pending = call.func.namespace == "_c10d_functional" and not _WAIT.match(call.operator)
    if is_pending or _MESSAGE.match(call.operator) or tensors.has_to_stay(call):
        return False
    returns = any("Tensor" in str(each.type) for each in call.func._schema.returns)
    return returns or bool(tensors.written_names(call))


def _world_size() -> int:
    if distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
