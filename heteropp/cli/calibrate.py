"""heteropp-calibrate: finds what a chip reaches from what measured runs took.

From one run: the share of the chip's peak at which the same run, simulated,
has the measured throughput. That run had a whole cluster of one chip type,
with stages alike, under 1F1B. From several (--runs): how far products,
attention, memory, the host and collectives stay below the data sheet, with
the error that the fit has on points it was not shown.
"""

from __future__ import annotations

import json as json_
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from hyperhetero.cli import CommandLine
from hyperhetero.output import why_no_file, why_no_folder

app = CommandLine()

EXAMPLES = """\b
Examples (the first is H2's Table 6, chip A):
  heteropp-calibrate --cluster h2-256-a --model h2-100b --global-batch 512 \\
    --pp 16 --dp 4 --tp 4 --tokens-per-chip-per-s 136.9
  heteropp-calibrate --cluster cluster.toml --model model.toml \\
    --global-batch 64 --pp 2 --dp 4 --tp 1 --recompute \\
    --tokens-per-chip-per-s 900 --output my-chip.toml
  heteropp-calibrate --runs b200 --output fitted/
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def calibrate(
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Several measurements: a measured-run file or preset (heteropp/description/"
            "presets/measured has public ones, and shows the form); nothing else is then given."
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster of one chip type: a file or preset.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model file, Hugging Face folder or preset.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Sequences per step.")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel degree.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel degree.")] = None,
    tokens_per_chip_per_s: Annotated[
        float | None, typer.Option(help="What was measured: tokens a second, per chip.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="The run recomputed activations.")
    ] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="The run offloaded to host memory.")
    ] = False,
    zero_stage: Annotated[int, typer.Option(min=0, max=2, help="The ZeRO stage of the run.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the chip file with this efficiency here; with --runs, a folder for the "
            "fitted chips' files.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    one_run = {
        "--cluster": cluster,
        "--model": model,
        "--global-batch": global_batch,
        "--pp": pp,
        "--dp": dp,
        "--tp": tp,
        "--tokens-per-chip-per-s": tokens_per_chip_per_s,
    }
    with one_sentence():
        why_not = why_no_file if runs is None else why_no_folder
        if output is not None and (problem := why_not(output)):
            raise InputError(problem)
        if runs is not None:
            given = [name for name, value in one_run.items() if value is not None]
            if given:
                raise InputError(f"--runs holds all measurements; {given[0]} was given, too")
            from heteropp.cli.calibrate_several import calibrate_several

            calibrate_several(runs, output, json)
            return
        missing = [name for name, value in one_run.items() if value is None]
        if missing:
            raise InputError(f"{missing[0]} is missing; expected it, or --runs with several runs")
        assert cluster and model and global_batch and pp and dp and tp
        assert tokens_per_chip_per_s is not None
        if not 0 < tokens_per_chip_per_s < float("inf"):
            raise InputError(
                f"--tokens-per-chip-per-s is {tokens_per_chip_per_s}; expected more than 0"
            )
        from heteropp.description.cluster import read_cluster
        from heteropp.description.model import read_model
        from heteropp.profiling import calibrate as library

        machines = read_cluster(cluster)
        shape = read_model(model, trust_remote_code=trust_remote_code)
        run = library.MeasuredRun(
            cluster=machines,
            model=shape,
            global_batch=global_batch,
            pp=pp,
            dp=dp,
            tp=tp,
            recompute=recompute,
            offload=offload,
            zero_stage=zero_stage,
            tokens_per_chip_per_s=tokens_per_chip_per_s,
        )
        try:
            found = library.calibrate(run)
        except library.CalibrationError as error:
            raise InputError(str(error)) from None
        chip_file = machines.nodes[0].chip.path
        if output:
            library.write_efficiency(chip_file, found.efficiency, output)
    if json:
        print(json_.dumps({**asdict(found), "assumed": _assumptions(run)}, indent=2))
        return
    from heteropp.cost.planned import human_bytes

    print(f"chip {found.chip} reaches {found.efficiency:.3f} of its peak in matrix products")
    print(
        f"predicted with it: {found.tokens_per_chip_per_s:.2f} tokens per chip and second "
        f"(measured: {tokens_per_chip_per_s:g})"
    )
    fits = "fits" if found.memory_bytes <= found.capacity_bytes else "DOES NOT FIT"
    print(
        f"memory: {human_bytes(found.memory_bytes)} of {human_bytes(found.capacity_bytes)}, {fits}"
    )
    print("assumed:")
    for line in _assumptions(run):
        print(f"  {line}")
    if output:
        print(f"{output} is {chip_file.name} with this efficiency")


def _assumptions(run) -> list[str]:
    chip = run.cluster.nodes[0].chip
    compute, links = chip.compute, chip.links
    return [
        f"stages alike: pp {run.pp}, dp {run.dp}, tp {run.tp}, {run.model.layers // run.pp} layers "
        "each, and the embedding and the head beside the layers of the first and the last",
        f"1F1B, one sequence a replica in each micro-batch, ZeRO stage {run.zero_stage}"
        + (", recompute" if run.recompute else "")
        + (", offload" if run.offload else ""),
        run.model.describe(),
        f"peak {chip.peak_flops(run.model.dtype):.4g} FLOP/s, memory "
        f"{chip.memory.bandwidth_bytes_per_s:.4g} bytes/s, {compute.launch_s:.2g} s a launch",
        f"inside a node {links.intra_node_bytes_per_s:.4g} bytes/s; {links.nics_per_node} NICs of "
        f"{links.nic_bytes_per_s:.4g} bytes/s; host {links.host_bytes_per_s:.4g} bytes/s",
    ]


def main() -> None:
    app()


if __name__ == "__main__":
    main()
