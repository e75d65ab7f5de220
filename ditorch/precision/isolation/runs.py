"""Runs of a training script, each in a process of its own, with the loss tool (and others) open."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from ditorch.chips import load_chip
from ditorch.precision.loss import read_losses
from ditorch.vendors import VENDORS, library

_SERVER = Path(__file__).with_name("run_server.py")
_PACKAGES = Path(__file__).resolve().parents[3]
_GRACE_S = 30.0  # for the server itself, beyond the script's deadline


class RunError(RuntimeError):
    """A run that left nothing to judge; one sentence with the end of its log."""


@dataclass(frozen=True)
class Run:
    """What is left of a run that ended."""

    output: Path  # the tools' files
    exit_code: int

    def losses(self) -> list[float]:
        """Raises RunError: the script ended before it had any."""
        try:
            return read_losses(self.output)
        except ValueError as error:
            raise RunError(f"{error} ({self.last_words()})") from None

    def last_words(self) -> str:
        """Why the script ended, from its log."""
        log = self.output / "log.txt"
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if line.strip() and not line.startswith("ditorch: ")  # the tools' own, at the exit
        ]
        return f"exit code {self.exit_code}, {log}: {lines[-1] if lines else 'empty'}"


class Runs:
    """Starts runs of one script; a context manager.

    `chip` is a preset or file of an emulated chip ("b", "chips/mine.toml") or a vendor's name
    ("cpu", "cuda", "npu", or "library" for the one that DITORCH_VENDOR_LIBRARY names): this
    process's own chip plays no part.
    """

    def __init__(self, script: Path, args: Sequence[str] = (), *, deadline_s: float = 600) -> None:
        if not script.is_file():
            raise ValueError(f"{script}: there is no such script")
        self.script = script
        self.args = list(args)
        self.deadline_s = deadline_s

    def __enter__(self) -> Self:
        _server.keep()
        return self

    def __exit__(self, *_: object) -> None:
        _server.let_go()

    def run(
        self, chip: str, output: Path, *, stop_after: int | None = None, **tools: Mapping[str, Any]
    ) -> Run:
        """One run on `chip`, at most `stop_after` steps, with `tools` of ditorch.toml's tables.

        A script that fails is no error here: its losses up to there may be all one needs.

        Raises:
            RunError: the run did not end within its deadline.
        """
        output.mkdir(parents=True, exist_ok=True)
        for stale in (*output.glob("*-rank*.json"), output / "log.txt"):
            stale.unlink(missing_ok=True)
        limit = {} if stop_after is None else {"stop_after": stop_after}
        tables = {"loss": {"output": str(output.resolve()), **limit}, **tools}
        request = {
            "script": str(self.script),
            "args": self.args,
            "environment": _environment(chip) | {"DITORCH_PRECISION": _toml(tables)},
            "log": str(output / "log.txt"),
            "deadline_s": self.deadline_s,
        }
        answer = _server.ask(request, self.deadline_s + _GRACE_S)
        if answer is None:
            raise RunError(f"the process that runs {self.script} ended or stopped answering")
        if answer["timed_out"]:
            raise RunError(f"{self.script} did not end within {self.deadline_s:g} s on {chip}")
        return Run(output, answer["exit_code"])


def chip_digest(chip: str) -> str:
    """The digest of the chip file or library that a run on `chip` loads; "" for other vendors.

    Raises ValueError: the chip file cannot be used; OSError: the library cannot be read.
    """
    if chip == library.VENDOR.name:
        path = library.look().library
    elif _is_vendor(chip):
        path = None
    else:
        path = load_chip(chip).path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""


class _Server:
    """The process that runs the scripts; it lives as long as any `Runs` is open."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._users = 0
        self._lock = threading.Lock()

    def keep(self) -> None:
        with self._lock:
            self._users += 1

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._end()

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any] | None:
        """Returns the server's answer, or None; the next request then starts a new one."""
        with self._lock:
            try:
                process = self._process = self._process or _start_server()
                assert process.stdin and process.stdout
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], deadline_s)
                if line := process.stdout.readline() if ready else b"":
                    answer: dict[str, Any] = json.loads(line)
                    return answer
            except BrokenPipeError:
                pass
            except BaseException:  # interrupted: the answer that is under way is not for the next
                self._end()
                raise
            self._end()
            return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.close()  # which also ends the run it is in
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


_server = _Server()


def _start_server() -> subprocess.Popen[bytes]:
    # torch must not load a plugin (or ditorch) before the run's own environment is known
    environment = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    environment["PYTHONPATH"] = _packages_first()
    return subprocess.Popen(
        [sys.executable, "-P", str(_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _environment(chip: str) -> dict[str, str]:
    """This process's, but for the chip: "b" and "mine.toml" are emulated chips, "cuda" a vendor.

    The vendor "library" is the library that this process's environment names.
    """
    others = {"DITORCH_CHIP", "DITORCH_VENDOR"}
    if chip != library.VENDOR.name:
        others |= {"DITORCH_VENDOR_LIBRARY", "EMUCHIP_CHIP"}
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return kept | {
        "DITORCH_VENDOR" if _is_vendor(chip) else "DITORCH_CHIP": chip,
        "PYTHONPATH": _packages_first(),
    }


def _is_vendor(chip: str) -> bool:
    return chip in {vendor.name for vendor in VENDORS}


def _packages_first() -> str:
    return os.pathsep.join([str(_PACKAGES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes tables as TOML, which spells strings, numbers and lists of them as JSON does."""
    spelled = partial(json.dumps, ensure_ascii=False)  # JSON's surrogate pairs are not TOML's
    return "\n".join(
        f"{name} = {{{', '.join(f'{key} = {spelled(v)}' for key, v in table.items())}}}"
        for name, table in tables.items()
    )
