"""heteropp-profile: measures a cluster's chips and links for a model, for heteropp-search.

One chip of each type runs blocks of 1, 2, 4 ... layers, and the model's two
ends; then two chips of each kind of pair send each other messages. Started
again, it goes on where its file ends.
"""

from __future__ import annotations

import json as json_
import os
import select
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.files import check_file
from heteropp.description.model import read_model
from heteropp.description.profile import (
    Block,
    Measured,
    Profile,
    blocks_of,
    pair_kinds,
    read_profile,
    write_profile,
)
from heteropp.models.spec import LARGEST, ModelSpec

if TYPE_CHECKING:
    from heteropp.profiling.links import LinkRun

DEADLINE_S = 600  # for one block

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-profile --cluster cluster.toml --model model.toml -o profile.json
  heteropp-profile --cluster cluster.toml --model model.toml \\
    --tp 1 --tp 2 --sequences 4
  heteropp-profile ... --chip a --no-links    # on a node of chips A
  torchrun --nnodes 2 ... -m heteropp.cli.profile ...    # links between nodes
"""


class ChipProcessError(RuntimeError):
    """A chip's process has failed; the message is one sentence."""


@app.command(help=__doc__, epilog=EXAMPLES)
def profile(
    cluster: Annotated[Path, typer.Option(help="The cluster file (TOML), or a preset's name.")],
    model: Annotated[
        Path, typer.Option(help="The model file, a Hugging Face folder, or a preset's name.")
    ],
    sequence_length: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens; as the model says if absent.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="What is written.")] = Path(
        "profile.json"
    ),
    chip: Annotated[
        list[str] | None, typer.Option(help="Only this chip of the cluster file; repeatable.")
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tensor-parallel degrees; all that suit chip and model if absent."
        ),
    ] = None,
    sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="Of a micro-batch in each replica; 1 if absent.")
    ] = None,
    most_layers: Annotated[
        int, typer.Option(min=1, help="The largest block has no more, nor than the model.")
    ] = 8,
    trust_remote_code: TrustRemoteCode = False,
    links: Annotated[bool, typer.Option("--links/--no-links", help="Measure links too.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    console = Console(highlight=False)
    with one_sentence():
        check_file(output)
        machines = read_cluster(cluster)
        shape = read_model(model, sequence_length, trust_remote_code=trust_remote_code)
        blocks = _blocks(machines, shape, chip, tp, sequences or [1], most_layers)
        if "RANK" in os.environ:  # torchrun's: every rank of the cluster takes part
            _measure_links_here(machines, shape, cluster, output)
            return
        started = _open(output, machines, shape)
        try:
            notes = _measure_blocks(started, blocks, machines, output)
        except ChipProcessError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
        if links:
            _launch_links(machines, cluster, output)
        found = read_profile(output)
    if json:
        print(json_.dumps({"citation": found.citation, **asdict(found)}, indent=2))
        return
    _show(console, found)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"{found.citation}, written to {output}", soft_wrap=True)


def _blocks(
    cluster: Cluster,
    model: ModelSpec,
    chips: list[str] | None,
    degrees: list[int] | None,
    sequences: list[int],
    most_layers: int,
) -> list[Block]:
    """All that is to be measured. Raises InputError."""
    names = cluster.chip_names()
    for name in chips or ():
        if name not in names:
            raise InputError(f"--chip {name}: cluster {cluster.name} has {', '.join(names)}")
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
    for name in chips or names:
        limit = cluster.chip(cluster.ranks_of(name)[0]).tp_limit
        suitable = degrees or model.tp_degrees(limit)
        blocks += list(blocks_of(name, suitable, sequences, min(most_layers, model.layers)))
    return blocks


def _open(path: Path, cluster: Cluster, model: ModelSpec) -> Profile:
    """The profile to go on with, or a new one. Raises FileError or InputError."""
    name = f"{cluster.name} {model.name}"
    if not path.exists():
        return Profile(name=name, model=model, blocks=(), links=())
    profile = read_profile(path)
    if (profile.name, profile.model) != (name, model):
        raise InputError(f"{path} is the profile {profile.name}; give another --output")
    return profile


def _measure_blocks(
    profile: Profile, blocks: list[Block], cluster: Cluster, output: Path
) -> list[str]:
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
        self._ask({"model": written, "chip": chip, "chip_type": chip_type})

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
        answer = self._ask(asdict(block))
        if "out_of_memory" in answer:
            return str(answer["out_of_memory"])
        return TypeAdapter(Measured).validate_json(json_.dumps(answer["measured"]))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        line = ""
        try:
            stdin.write(json_.dumps(question) + "\n")
            stdin.flush()
            if select.select([stdout], [], [], DEADLINE_S)[0]:
                line = stdout.readline()
            else:
                self._fail(f"has not answered for {DEADLINE_S} s")
        except BrokenPipeError:
            pass
        if not line:
            self._fail(f"ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json_.loads(line)
        if "failed" in answer:
            self._fail(f"failed: {answer['failed']}")
        return answer

    def _fail(self, how: str) -> None:
        self.process.kill()
        self.process.wait()
        raise ChipProcessError(
            f"profiling stopped: chip {self.chip_type} {how}; what was measured is kept"
        )


def _link_run(cluster: Cluster, path: Path, output: Path, everyone: bool) -> LinkRun:
    from heteropp.profiling.links import LinkRun

    pairs = tuple((kind, *ranks) for kind, ranks in sorted(pair_kinds(cluster).items()))
    ranks = sorted({rank for _, *two in pairs for rank in two})
    if everyone:
        ranks = list(range(cluster.world_size))
    chips = tuple((str(cluster.chip(r).path), cluster.chip(r).chip_type) for r in ranks)
    return LinkRun(path, tuple(ranks), chips, pairs, output, output.parent / "profile-logs")


def _launch_links(cluster: Cluster, path: Path, output: Path) -> None:
    known = {link.pair for link in read_profile(output).links}
    if known.issuperset(pair_kinds(cluster)):
        return
    from heteropp.profiling.links import measure_links
    from heteropp.runtime.ranks.launch import launch

    run = _link_run(cluster, path, output, everyone=False)
    labels = tuple(
        f"rank {rank} (chip {chip[1]})" for rank, chip in zip(run.ranks, run.chips, strict=True)
    )
    code = launch(measure_links, run, labels=labels, logs=run.logs, what="profiling")
    if code:
        raise typer.Exit(code)


def _measure_links_here(cluster: Cluster, model: ModelSpec, path: Path, output: Path) -> None:
    """Measures the links, where this process is one of the ranks that torchrun started.

    Raises InputError unless torchrun started as many ranks as the cluster has.
    """
    from heteropp.profiling.links import measure_links

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != cluster.world_size:
        raise InputError(
            f"cluster {cluster.name} has {cluster.world_size} ranks; torchrun started {world_size}"
        )
    if os.environ["RANK"] == "0":
        write_profile(_open(output, cluster, model), output)
    measure_links(_link_run(cluster, path, output, everyone=True))


def _show(console: Console, profile: Profile) -> None:
    """A table of the blocks, in milliseconds, and one of the links."""
    table = Table(title=f"profile {profile.name}, ms", box=None, padding=(0, 1, 0, 0))
    for heading in ("chip", "tp", "seqs", "block"):
        table.add_column(heading, no_wrap=True)
    terms = ("forward", "recompute", "backward_input", "backward_weight", "update")
    for heading in ("forward", "recompute", "input", "weight", "update"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measured in profile.blocks:
        block = measured.block
        ends = ("tokens, " if block.first else "") + str(block.layers)
        name = ends + (", head" if block.last else "")
        cells = (f"{getattr(measured, f'{term}_s') * 1e3:.3f}" for term in terms)
        table.add_row(block.chip, str(block.tp), str(block.sequences), name, *cells)
    console.print(table)
    if not profile.links:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("link", "", "latency, us", "MB/s"):
        table.add_column(heading, no_wrap=True)
    for link in profile.links:
        between = [
            f"{c} at {p}" if p else c
            for c, p in zip(link.pair.chips, link.pair.places, strict=True)
        ]
        where = "same node" if link.pair.same_node else "between nodes"
        row = f"{link.latency_s * 1e6:.1f}", f"{link.bytes_per_s / 1e6:.1f}"
        table.add_row(" to ".join(between), where, *row)
    console.print(table)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
