"""The command line: what was asked for is checked here, then measured, then shown."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from dicomm.bench.options import (
    BadOption,
    check_plot,
    check_range,
    parse_names,
    parse_nics,
    parse_ranks,
    parse_sizes,
)
from dicomm.bench.quiet import worst
from dicomm.bench.timing import Failed
from dicomm.pictures import PictureError
from hyperhetero.cli import CommandLine, output_file

app = CommandLine(no_args_is_help=True)

Sizes = Annotated[str, typer.Option(help="Message sizes, such as 8,4K,64M.")]
Transports = Annotated[
    str | None,
    typer.Option(
        help="shm, tcp or verbs, or several with commas; all that this machine has if absent."
    ),
]
Apis = Annotated[
    str, typer.Option(help="Which of dicomm's interfaces to measure: c++, python, torch.")
]
Peers = Annotated[
    str, typer.Option(help="Which libraries to measure beside: gloo, mpi, ucx, perftest; or none.")
]
Nics = Annotated[
    str | None, typer.Option(help="RDMA device of both ranks, or of each, as in rxe0,rxe1.")
]
Repeats = Annotated[int, typer.Option(help="Interleaved rounds, 1 to 1000.")]
RoundS = Annotated[float, typer.Option(help="Seconds of a turn, 0.001 to 60.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")]
Plot = Annotated[Path | None, output_file(help="Draw the result: a .png or .svg file.")]

Chosen = tuple[list[str], list[str], list[str], tuple[str, ...]]  # transports, APIs, peers, NICs


def speaks_plainly(command: Callable[..., None]) -> Callable[..., None]:
    """A mistake of whoever typed it ends with 2, a failure with 1, each in one sentence."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (BadOption, Failed, PictureError) as error:
            typer.echo(f"dicomm-bench: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, Failed) else 2) from None

    return guarded


@app.callback()
def _commands() -> None:
    """What messages and collectives cost with dicomm, and with its peers in the same run."""


@app.command(
    epilog="Examples:  dicomm-bench p2p   |   dicomm-bench p2p --sizes 8,64K,1M --transports shm "
    "--peers gloo --json   |   dicomm-bench p2p --plot p2p.png"
)
@speaks_plainly
def p2p(
    sizes: Sizes = "8,1K,4K,64K,1M,16M,64M",
    transports: Transports = None,
    apis: Apis = "c++,python,torch",
    peers: Peers = "gloo,mpi,ucx,perftest",
    nics: Nics = None,
    repeats: Repeats = 5,
    round_s: RoundS = 0.06,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Latency, half a round trip, between two processes of this machine."""
    from dicomm.bench import contestants, latency
    from dicomm.bench.evidence import evidence
    from dicomm.bench.rounds import compete

    lengths = parse_sizes(sizes)
    chosen = _pairs(transports, apis, peers, nics, repeats, round_s)
    check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        field = contestants.pairs(*chosen, folder)
        cases = [("latency", length) for length in lengths]
        results = compete(field.entries, cases, repeats, round_s)
    found = latency.Latencies(results, lengths, chosen[1], field.peers)
    missing = {**field.absent, **results.missing}
    result = evidence("p2p", latency.rows(found), results.quiet, missing)
    _tell(result, as_json, partial(latency.show, found))
    if plot:
        from dicomm.bench import picture  # late: matplotlib takes a while

        picture.latencies(found, result["machine"], plot)
    _fail_with_dicomm(results.missing)


@app.command(
    epilog="Examples:  dicomm-bench bandwidth   |   dicomm-bench bandwidth --sizes 1M --json"
)
@speaks_plainly
def bandwidth(
    sizes: Sizes = "4K,64K,1M,16M",
    transports: Transports = None,
    apis: Apis = "c++,python,torch",
    peers: Peers = "gloo,mpi,ucx,perftest",
    nics: Nics = None,
    repeats: Repeats = 5,
    round_s: RoundS = 0.06,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Bandwidth with many messages in flight, one way and both ways at once."""
    chosen = _pairs(transports, apis, peers, nics, repeats, round_s)
    _throughput("bandwidth", ["uni", "bi"], "GB/s", sizes, chosen, repeats, round_s, as_json, plot)


@app.command(epilog="Examples:  dicomm-bench rate   |   dicomm-bench rate --sizes 8 --json")
@speaks_plainly
def rate(
    sizes: Sizes = "8,64,1K",
    transports: Transports = None,
    apis: Apis = "c++,python,torch",
    peers: Peers = "gloo,mpi,ucx,perftest",
    nics: Nics = None,
    repeats: Repeats = 5,
    round_s: RoundS = 0.06,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Messages per second, small ones, many in flight."""
    chosen = _pairs(transports, apis, peers, nics, repeats, round_s)
    _throughput("rate", ["uni"], "messages/s", sizes, chosen, repeats, round_s, as_json, plot)


@app.command(
    epilog="Examples:  dicomm-bench collectives   |   dicomm-bench collectives --ranks 2 "
    "--operations allreduce --sizes 1K,1M --json"
)
@speaks_plainly
def collectives(
    operations: Annotated[
        str | None, typer.Option(help="Collectives, such as allreduce,broadcast; all if absent.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Sizes of the vector that the whole group works on.")
    ] = "1K,64K,1M",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    transport: Annotated[str, typer.Option(help="shm or tcp.")] = "shm",
    peers: Annotated[
        str, typer.Option(help="Which libraries to measure beside: gloo, mpi; or none.")
    ] = "gloo,mpi",
    repeats: Repeats = 3,
    round_s: RoundS = 0.05,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Collectives of float32 vectors through torch.distributed."""
    from dicomm.bench import contestants, group
    from dicomm.bench.evidence import evidence
    from dicomm.bench.rounds import compete

    names = list(group.COLLECTIVES)
    if operations is not None:
        names = parse_names("--operations", operations, group.COLLECTIVES)
    lengths, worlds = parse_sizes(sizes), parse_ranks(ranks)
    if transport not in ("shm", "tcp"):
        raise BadOption(f"--transport: '{transport}' is not one of shm, tcp")
    against = parse_names("--peers", peers, ("gloo", "mpi", "none"))
    check_range("--repeats", repeats, 1, 1000)
    check_range("--round-s", round_s, 0.001, 60)
    check_plot(plot)
    results, absent, failed = {}, dict[str, str](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        for world in worlds:
            field = contestants.teams(world, transport, against, folder)
            cases = group.cases(names, lengths)
            results[world] = compete(field.entries, cases, repeats, round_s)
            absent |= field.absent
            failed |= {f"{n}, {world} ranks": why for n, why in results[world].missing.items()}
    found = group.Collectives(results, names, lengths, transport, field.peers[transport])
    quiet = worst([each.quiet for each in results.values() if each.quiet])
    result = evidence("collectives", group.rows(found), quiet, absent | failed)
    _tell(result, as_json, partial(group.show, found))
    if plot:
        from dicomm.bench import picture  # late: matplotlib takes a while

        picture.collectives(found, result["machine"], plot)
    _fail_with_dicomm(failed)


@app.command(
    epilog="Examples:  dicomm-bench security   |   dicomm-bench security --sizes 1M,64M --json"
)
@speaks_plainly
def security(
    sizes: Sizes = "8,64K,1M,16M,64M",
    repeats: Repeats = 5,
    round_s: RoundS = 0.06,
    as_json: AsJson = False,
) -> None:
    """What integrity and encryption (DICOMM_SECURITY) cost over TCP, half a round trip."""
    from dicomm.bench import security as prices
    from dicomm.bench.evidence import evidence
    from dicomm.bench.rounds import compete

    lengths = parse_sizes(sizes)
    check_range("--repeats", repeats, 1, 1000)
    check_range("--round-s", round_s, 0.001, 60)
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        cases = [("latency", length) for length in lengths]
        results = compete(prices.entries(folder), cases, repeats, round_s)
    found = prices.rows(results, lengths)
    result = evidence("security", found, results.quiet, results.missing)
    _tell(result, as_json, partial(prices.show, results, lengths))
    _fail_with_dicomm(results.missing)


@app.command(
    epilog="Examples:  dicomm-bench device   |   dicomm-bench device --chips a,c --plot fig7.png   "
    "|   dicomm-bench device --sizes 4K,1M --slow-motion 20 --json"
)
@speaks_plainly
def device(
    sizes: Sizes = "256,1K,4K,16K,64K,256K,1M,4M,16M,64M",
    chips: Annotated[
        str, typer.Option(help="Two of ditorch's chips, or chip files: one for each rank.")
    ] = "a,b",
    tcp: Annotated[
        Path | None, typer.Option(help="The hosts' TCP/IP, a file like dicomm/bench/tcp.toml.")
    ] = None,
    slow_motion: Annotated[
        float,
        typer.Option(
            help="How much slower the chips' time passes, 1 to 10000; over 1 MiB a tenth of that."
        ),
    ] = 400.0,
    repeats: Repeats = 3,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Device-direct against CPU-mediated on emulated chips: the H2 paper's figure 7."""
    from dicomm.bench import strategies
    from dicomm.bench.chips import TCP_FILE, read_chip, read_tcp
    from dicomm.bench.evidence import evidence

    lengths = parse_sizes(sizes)
    names = [name.strip() for name in chips.split(",")]
    if len(names) != 2:
        raise BadOption(f"--chips: '{chips}' is not two chips, one for each rank, like a,b")
    world = strategies.World((read_chip(names[0]), read_chip(names[1])), read_tcp(tcp or TCP_FILE))
    check_range("--slow-motion", slow_motion, 1, 10_000)
    check_range("--repeats", repeats, 1, 1000)
    check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        found = strategies.measure(world, lengths, slow_motion, repeats, folder)
    result = evidence("device", strategies.rows(found), found.quiet, {})
    _tell(result, as_json, partial(strategies.show, found))
    if plot:
        from dicomm.bench import picture  # late: matplotlib takes a while

        picture.strategies(found, result["machine"], plot)


def _throughput(
    command: str,
    kinds: list[str],
    unit: str,
    sizes: str,
    chosen: Chosen,
    repeats: int,
    round_s: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    from dicomm.bench import contestants, throughput
    from dicomm.bench.evidence import evidence
    from dicomm.bench.rounds import compete

    lengths = parse_sizes(sizes)
    check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        field = contestants.pairs(*chosen, folder)
        cases = [(kind, length) for kind in kinds for length in lengths]
        results = compete(field.entries, cases, repeats, round_s)
    found = throughput.Throughput(results, lengths, kinds, chosen[1], field.peers, unit)
    missing = {**field.absent, **results.missing}
    result = evidence(command, throughput.rows(found), results.quiet, missing)
    _tell(result, as_json, partial(throughput.show, found))
    if plot:
        from dicomm.bench import picture  # late: matplotlib takes a while

        picture.throughputs(found, result["machine"], plot)
    _fail_with_dicomm(results.missing)


def _tell(result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show(result)


def _fail_with_dicomm(missing: Mapping[str, str]) -> None:
    """A peer may fail, and is said to; if dicomm does, so does the command."""
    for name, why in missing.items():
        if name.startswith("dicomm"):
            raise Failed(f"{name}: {why}")


def _pairs(
    transports: str | None,
    apis: str,
    peers: str,
    nics: str | None,
    repeats: int,
    round_s: float,
) -> Chosen:
    """The checked transports, APIs, peers and NICs of a measurement between two ranks."""
    from dicomm.bench import contestants

    check_range("--repeats", repeats, 1, 1000)
    check_range("--round-s", round_s, 0.001, 60)
    used = contestants.default_transports()
    if transports is not None:
        used = parse_names("--transports", transports, contestants.TRANSPORTS)
    devices = contestants.choose_nics(used, parse_nics(nics) if nics else None)
    return (
        used,
        parse_names("--apis", apis, contestants.APIS),
        parse_names("--peers", peers, contestants.PEERS),
        devices,
    )
