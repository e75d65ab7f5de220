"""heteropp-profile: a process for each chip type measures blocks of a model's layers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

from heteropp.api.errors import InputError
from heteropp.description.cluster import Cluster
from heteropp.description.profile import (
    Block,
    Measured,
    Profile,
    blocks_of,
    read_profile,
    write_profile,
)
from heteropp.models.spec import ModelSpec
from hyperhetero.progress import Progress

DEADLINE_S = 600  # for one block


class ChipProcessError(RuntimeError):
    """A chip's process has failed; the message is one sentence."""


def check_chips(cluster: Cluster, chips: list[str] | None) -> list[str]:
    """Returns the chips of a cluster that are asked for, or all. Raises InputError."""
    names = cluster.chip_names()
    for name in chips or ():
        if name not in names:
            raise InputError(f"--chip {name}: cluster {cluster.name} has {', '.join(names)}")
    return chips or names


def wanted(
    cluster: Cluster,
    model: ModelSpec,
    chips: list[str],
    degrees: list[int] | None,
    sequences: list[int],
    most_layers: int,
) -> list[Block]:
    """All that is to be measured. Raises InputError."""
    kinds = [kind for kind, _ in model.block_counts([(0, model.layers)])]
    if len(kinds) > 1:
        raise InputError(
            f"model {model.name} has blocks of kinds {', '.join(kinds)}; a profile is of blocks "
            "that are alike"
        )
    for degree in degrees or ():
        if problem := model.tp_problem(degree):
            raise InputError(f"--tp {degree}: {problem}")
    blocks = []
    for name in chips:
        limit = cluster.chip(cluster.ranks_of(name)[0]).tp_limit
        suitable = degrees or model.tp_degrees(limit)
        blocks += list(blocks_of(name, suitable, sequences, min(most_layers, model.layers)))
    return blocks


def open_profile(path: Path, cluster: Cluster, model: ModelSpec) -> Profile:
    """The profile to go on with, or a new one. Raises FileError or InputError."""
    name = f"{cluster.name} {model.name}"
    if not path.exists():
        return Profile(name=name, model=model, blocks=(), links=())
    profile = read_profile(path)
    if (profile.name, profile.model) != (name, model):
        raise InputError(f"{path} is the profile {profile.name}; give another --output")
    return profile


def measure(profile: Profile, blocks: list[Block], cluster: Cluster, output: Path) -> list[str]:
    """Adds what is missing to the file, one by one; tells what could not be measured."""
    known = {measured.block for measured in profile.blocks}
    missing = [block for block in blocks if block not in known]
    notes: list[str] = []
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
    write_profile(profile, output)
    if not missing:
        return notes
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(missing))
        for name in dict.fromkeys(block.chip for block in missing):
            progress.update(task, description=f"chip {name}")
            spec = cluster.chip(cluster.ranks_of(name)[0])
            with ChipProcess(str(spec.path), spec.chip_type, profile.model) as process:
                too_large: list[Block] = []
                for block in (block for block in missing if block.chip == name):
                    progress.advance(task)
                    if any(_holds(block, other) for other in too_large):
                        continue
                    measured = process.measure(block)
                    if isinstance(measured, str):
                        too_large.append(block)
                        notes.append(
                            f"chip {name} has no memory for {block.layers} layers with tp "
                            f"{block.tp} and {block.sequences} sequences"
                        )
                        continue
                    found = sorted((*profile.blocks, measured), key=lambda m: m.block)
                    profile = replace(profile, blocks=tuple(found))
                    write_profile(profile, output)
    return notes


def _holds(larger: Block, smaller: Block) -> bool:
    return replace(larger, layers=smaller.layers) == smaller and larger.layers >= smaller.layers


class ChipProcess:
    """A process that is one chip, and measures what it is told."""

    def __init__(self, chip: str, chip_type: str, model: ModelSpec) -> None:
        self.chip_type = chip_type
        self.process = subprocess.Popen(
            [sys.executable, "-m", "heteropp.profiling.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        written = TypeAdapter(ModelSpec).dump_python(model, mode="json")
        self.ask({"model": written, "chip": chip, "chip_type": chip_type})

    def __enter__(self) -> ChipProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def measure(self, block: Block) -> Measured | str:
        """What was measured, or why the chip's memory is too small. Raises ChipProcessError."""
        answer = self.ask({"block": asdict(block)})
        if "out_of_memory" in answer:
            return str(answer["out_of_memory"])
        return TypeAdapter(Measured).validate_json(json.dumps(answer["measured"]))

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the process's answer to one line. Raises ChipProcessError."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        line = ""
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            if select.select([stdout], [], [], DEADLINE_S)[0]:
                line = stdout.readline()
            else:
                self._fail(f"has not answered for {DEADLINE_S} s")
        except BrokenPipeError:
            pass
        if not line:
            self._fail(f"ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            self._fail(f"failed: {answer['failed']}")
        return answer

    def _fail(self, how: str) -> None:
        self.process.kill()
        self.process.wait()
        raise ChipProcessError(
            f"profiling stopped: chip {self.chip_type} {how}; what was measured is kept"
        )
