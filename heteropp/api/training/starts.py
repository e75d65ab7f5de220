"""What a run was started with, kept in its folder, so that --resume needs nothing else.

But for --trust-remote-code: what is in a folder does not say that code in another may run.

Each start of the run has a folder of its own, starts/1 and so on, which appears whole:

    start.json        the command line, when and where it was given, versions, seed, hyperparameters
    plan.json         the plan; of a run of mixed lengths bucket-1.json, bucket-2.json ...
    cluster.toml      the cluster, with the chip files that it names
    chips/            the files of its other chips, which come with the package, as they were then
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from heteropp.api.training.validation_sets import absolute
from heteropp.description.cluster import read_cluster
from heteropp.description.cluster_writer import write_cluster
from heteropp.description.files import (
    FileError,
    flush,
    make_folder,
    read_json,
    write_json,
    write_text,
)
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, write_plan

STARTS = "starts"
START, PLAN, BUCKET, CLUSTER = "start.json", "plan.json", "bucket-{}.json", "cluster.toml"
VERSION = 1
# what another start says for itself
NOT_KEPT = {"folder", "output", "resume", "resume_from", "node_name", "json", "trust_remote_code"}
# files, folders or URLs, which processes in another folder have to find
LOCATIONS = {"profile", "data", "weights", "disk", "availability", "remote"}
PACKAGES = ("hyperhetero", "torch", "numpy", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a job, as its output folder records it."""

    command: tuple[str, ...]
    directory: str  # in which it was given
    host: str
    at: str  # time of day
    versions: dict[str, str]
    seed: int
    hyperparameters: Hyperparameters
    options: dict[str, Any]  # those that were given, here or to an earlier start; absolute paths
    version: int = VERSION


def keep_start(
    output: Path,
    options: Mapping[str, Any],
    plans: Sequence[Plan],
    cluster: Path | None,
    seed: int,
    hyperparameters: Hyperparameters,
) -> None:
    """Adds a start to the run in `output`; options: by parameter of the command. Raises FileError.

    plans: one, or, of a run of mixed lengths, those of the buckets. cluster: None where the
    run reads no cluster file, as without chips.
    """
    number = max(_numbers(output), default=0) + 1
    folder = output / STARTS / str(number)
    partial = folder.with_name(f".{number}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if options.get("bucket"):
        for i, plan in enumerate(plans, 1):
            write_plan(plan, partial / BUCKET.format(i))
    else:
        write_plan(plans[0], partial / PLAN)
    if cluster is not None:
        _write_cluster(cluster, partial)
    kept = {
        name: _absolute(value) if name in LOCATIONS else _as_text(value)
        for name, value in options.items()
        if name not in NOT_KEPT
    }
    if "validation" in kept:
        kept["validation"] = absolute(kept["validation"])
    start = Start(
        command=tuple(sys.argv),
        directory=os.getcwd(),
        host=socket.gethostname(),
        at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        versions={"python": platform.python_version()} | _versions(),
        seed=seed,
        hyperparameters=hyperparameters,
        options=kept,
    )
    write_json(partial / START, start)
    try:
        flush(partial)
        partial.rename(folder)
        flush(folder.parent)
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror}") from None


def newest_options(output: Path) -> dict[str, Any]:
    """The options that the newest start of a run had, with its own copies of plan and cluster.

    Empty for a run that keeps no start. Raises FileError.
    """
    number = max(_numbers(output), default=0)
    if not number:
        return {}
    folder = output / STARTS / str(number)
    start = read_json(folder / START, Start)
    if start.version != VERSION:
        raise FileError(
            f"{folder / START}: version is {start.version}; this release reads {VERSION}"
        )
    # also of what somebody else wrote, which may not say that its code is to be trusted
    options = {name: value for name, value in start.options.items() if name not in NOT_KEPT}
    if isinstance(options.get("validation"), str):  # of an earlier release, which took one
        options["validation"] = [options["validation"]]
    if "plan" in options:
        options["plan"] = str(folder / PLAN)
    if "bucket" in options:
        count = len(options["bucket"])
        options["bucket"] = [str(folder / BUCKET.format(i + 1)) for i in range(count)]
    if (folder / CLUSTER).exists():
        options["cluster"] = str(folder / CLUSTER)
    return options


def _numbers(output: Path) -> list[int]:
    folder = output / STARTS
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return [int(name) for name in names if name.isdecimal()]


def _write_cluster(path: Path, folder: Path) -> None:
    cluster = read_cluster(path)
    write_cluster(cluster, folder / CLUSTER)
    for node in cluster.nodes:
        if not node.chip_name.endswith(".toml"):
            copy = folder / "chips" / f"{node.chip_name}.toml"
            if not copy.exists():
                make_folder(copy.parent)
                write_text(copy, node.chip.path.read_text(encoding="utf-8"))


def _absolute(location: Path | str) -> str:
    return str(location) if "://" in str(location) else str(Path(location).absolute())


def _as_text(value: Any) -> Any:
    """Returns an option's value as JSON can hold it: paths become strings."""
    if isinstance(value, list | tuple):
        return [_as_text(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # used from its sources
            continue
    return found
