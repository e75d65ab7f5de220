"""dicomm's C++ API, by the program that lies beside libdicomm."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from dicomm.bench.lines import LineProgram
from dicomm.bench.oneshot import OneShot, run_pair
from dicomm.bench.timing import Order, Timing

_LIBRARY = Path(__file__).parents[1] / "lib"
PERF, COLLECTIVES = _LIBRARY / "dicomm-perf", _LIBRARY / "dicomm-collectives"
SCALE = _LIBRARY / "dicomm-scale"


def why_absent(program: Path) -> str | None:
    return None if program.exists() else f"{program.name} is not built"


class CppApi(OneShot):
    MODES: ClassVar = {"latency": "latency", "uni": "bandwidth", "bi": "bidirectional"}

    def __init__(
        self,
        name: str,
        transport: str,
        folder: str,
        secret: str,
        nics: tuple[str, ...],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """environment: of both ranks, besides the secret and the NICs."""
        super().__init__(name)
        self._transport, self._nics = transport, nics
        self._environment = {"DICOMM_SECRET": secret, **environment}
        self._folders = (Path(folder) / f"cpp-{transport}-{i}" for i in itertools.count())

    def measure(self, order: Order) -> Timing:
        folder = next(self._folders)
        folder.mkdir(parents=True)
        words: list[str | Path] = [
            PERF,
            self.MODES[order.kind],
            "--store",
            folder,
            "--transport",
            self._transport,
        ]
        words += ["--sizes", str(order.bytes), "--iterations", str(order.count)]
        words += ["--window", str(order.window), "--listen", "127.0.0.1", "--rank"]
        environments = [dict(self._environment) for _ in range(2)]
        if self._nics:
            for rank, environment in enumerate(environments):
                environment["DICOMM_NICS"] = self._nics[rank]
        output = run_pair([*words, "0"], [*words, "1"], environments)[0]
        shutil.rmtree(folder, ignore_errors=True)
        found = json.loads(output.splitlines()[-1])
        if order.kind == "latency":
            return Timing(found["median_us"], found["p99_us"])
        moved = order.bytes * order.window * (2 if order.kind == "bi" else 1)
        return Timing(moved * 1e6 / found["bytes_per_s"], moved * 1e6 / found["p99_bytes_per_s"])


class CppCollectives(LineProgram):
    """The collectives: one process starts the others, as mpirun does."""

    def __init__(self, name: str, transport: str, ranks: int) -> None:
        super().__init__(name, [COLLECTIVES, str(ranks), transport])
