"""heteropp-search: finds the best plan for a model on a cluster."""

from __future__ import annotations

import json as json_
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.console import Console

from heteropp.api.console import output_console, seconds
from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.show import (
    as_dict,
    say,
    show_all,
    show_experts,
    show_parts,
    show_plan,
    show_prediction,
    show_slices,
    show_terms,
)
from heteropp.cli.trust import TrustRemoteCode
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.outline import outline
from heteropp.description.schedules import Schedule
from heteropp.models.spec import LARGEST
from heteropp.search.planner import (
    MOST_PARTS,
    MOST_SEQUENCES,
    PLANNERS,
    DoesNotFitError,
    Request,
    SearchError,
)
from hyperhetero.cli import CommandLine, output_file
from hyperhetero.progress import Status

if TYPE_CHECKING:
    from heteropp.description.cluster import Cluster
    from heteropp.description.plan import ZeroStage
    from heteropp.search.judge import Verdict

REMEDIES = 2  # named for a request without a plan

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-search --cluster quickstart --model quickstart --global-batch 16
  heteropp-search --cluster cluster.toml --model Llama-3.2-1B \\
    --sequence-length 4096 --global-batch 512 --output plan.json --explain
  heteropp-search --cluster cluster.toml --model Qwen3-8B --lora r=16 \\
    --sequence-length 4096 --global-batch 64 --output plan.json
  heteropp-search --cluster h2-exp-a --model h2-100b --global-batch 512 \\
    --planner all
  heteropp-search --cluster cluster.toml --model model.toml \\
    --global-batch 64 --what-if "-1 b" --what-if "+2 a"
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def search(
    cluster: Annotated[str, typer.Option(help="The cluster file (TOML), or a preset's name.")],
    model: Annotated[
        str,
        typer.Option(
            help="The model file (TOML, or a Hugging Face folder), a preset's name, or "
            "file.py:function of your own."
        ),
    ],
    global_batch: Annotated[
        int, typer.Option(min=1, max=MOST_SEQUENCES, help="Sequences per optimizer step.")
    ],
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, max=LARGEST, help="Tokens per sequence; the model file's if absent."),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            help="Train LoRA beside a Hugging Face folder's frozen weights: "
            "r=16[,alpha=32][,targets=q_proj+v_proj], or targets=all-linear."
        ),
    ] = None,
    planner: Annotated[
        str, typer.Option(help=f"{', '.join(PLANNERS)}, or all: each under one simulator.")
    ] = "auto",
    output: Annotated[
        Path | None, output_file("--output", "-o", help="Where to write the plan.")
    ] = None,
    micro_batch_per_replica: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences of a micro-batch in each replica; if absent, planner auto chooses, "
            "and others take 1.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(get_args(Schedule))}; if absent, planner auto chooses, and others "
            "take 1f1b."
        ),
    ] = None,
    zero_stage: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2,
            help="How far ZeRO cuts what replicas hold alike: 1 optimizer, 2 gradients too; if "
            "absent, planner auto chooses, and others take 1.",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help=f"{' or '.join(get_args(OptimizerName))}, which the plan is for.")
    ] = "adamw",
    uneven_layers: Annotated[
        bool,
        typer.Option(
            "--uneven-layers",
            help="Of planner exact: let stages of one chip type hold unlike numbers of layers.",
        ),
    ] = False,
    stage_degrees: Annotated[
        bool,
        typer.Option(
            "--stage-degrees",
            help="Of planner exact: let stages of one chip type have unlike tp and dp.",
        ),
    ] = False,
    context_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_PARTS,
            help="The most ranks over which planners auto and exact cut sequences; 1: they cut "
            "none, as --bucket asks, nor run slices that were not asked for. If absent, planner "
            "auto takes 8 where sequences have 16384 tokens or more or nothing fits otherwise, and "
            "planner exact cuts none.",
        ),
    ] = None,
    token_slices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_PARTS,
            help="The most slices in which planner auto lets pipelines run each sequence; 1: they "
            "run it whole. If absent, it takes 16, or one for each 1024 tokens if these are "
            "fewer, where it also cuts sequences over ranks.",
        ),
    ] = None,
    expert_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_PARTS,
            help="The most ranks over which planners auto and exact let the experts of a layer "
            "lie; 1: each rank has all of them. If absent, planner auto takes 64 where nothing "
            "fits otherwise, and planner exact spreads none. The first such search for a model "
            "may take minutes.",
        ),
    ] = None,
    expert_capacity: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Where experts lie over ranks: how many times the even number of a micro-batch's "
            "rows those of a rank take at most. Memory then has room for them, and a step in which "
            "more come says so and ends. If absent, rows are taken to be even.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What heteropp-profile measured, in place of chip files.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help='Plan also with nodes added or lost: "+2 a", "-1 b, +1x8 c".'),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Of planner auto, by the clock, such as 10s or 5m: the plan then depends on the "
            "machine. If absent, the size of the problem alone says how many plans are simulated: "
            "in seconds for up to 16 chips, in minutes for hundreds."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every term of the prediction.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the nearest plan even if it does not fit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    console = output_console()
    with one_sentence():
        from heteropp.api.planning import request as asked
        from heteropp.description.plan import write_plan

        request = asked(
            model,
            cluster,
            planner=planner,
            global_batch=global_batch,
            micro_batch_per_replica=micro_batch_per_replica,
            schedule=cast(Schedule | None, schedule),
            zero_stage=cast("ZeroStage | None", zero_stage),
            optimizer=cast(OptimizerName, optimizer),
            uneven_layers=uneven_layers,
            stage_degrees=stage_degrees,
            sequence_length=sequence_length,
            lora=lora,
            profile=profile,
            context_parallel=context_parallel,
            token_slices=token_slices,
            expert_parallel=expert_parallel,
            expert_capacity=expert_capacity,
            budget_s=_budget_s(budget),
            trust_remote_code=trust_remote_code,
        )
        elsewhere = [(text, _changed(request.cluster, text)) for text in what_if or []]
        verdicts = _ask(planner, request)
        best = verdicts[0]
        others = [
            (text, machines, _ask_elsewhere(text, machines, best.planner, request))
            for text, machines in elsewhere
        ]
        if not best.judged and (output or not any(v.judged for _, _, v in others)):
            _refuse(best, request, output, force, json)
            return
        if output:
            write_plan(best.best.plan, output)
    if json:
        result = as_dict(best)
        if len(verdicts) > 1:
            result["planners"] = [as_dict(verdict) for verdict in verdicts]
        if what_if:
            result["what_if"] = [{"change": text, **as_dict(v)} for text, _, v in others]
        print(json_.dumps(result, indent=2))
        return
    if len(verdicts) > 1:
        show_all(console, verdicts, request.cluster)
    if best.judged:
        show_plan(console, best.best.plan, best.best.simulation.cluster)
        show_prediction(console, best)
    else:
        say(console, str(best.error))
    for text, machines, verdict in others:
        _show_elsewhere(console, text, machines, verdict, best)
    if explain and best.judged:
        show_slices(console, best.best.plan, best.best.simulation.cluster)
        show_parts(console, best.best.plan, best.best.simulation.cluster)
        show_experts(console, best.best.plan, best.best.simulation.cluster)
        show_terms(console, best.best.plan, best.best.simulation.cluster)
    if output:
        say(console, f"written to {output}")


def _budget_s(text: str | None) -> float | None:
    """Returns the seconds of --budget. Raises InputError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    seconds_ = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < seconds_ <= 86400:
        raise InputError(f"--budget is {text!r}; expected a time such as 10s, 5m or 1h")
    return seconds_


def _ask(name: str, request: Request) -> list[Verdict]:
    """The planner's verdict, or all planners', the best first."""
    if name not in (*PLANNERS, "all"):
        raise InputError(f"--planner is {name}; expected one of {', '.join(PLANNERS)}, or all")
    from heteropp.search.judge import ask, ask_all

    with Status("searching"):
        return ask_all(PLANNERS, request) if name == "all" else [ask(name, request)]


def _refuse(
    verdict: Verdict, request: Request, output: Path | None, force: bool, json: bool
) -> None:
    """Says why there is no plan; with --force, writes the nearest one all the same."""
    error = verdict.error
    assert error is not None
    if not force or not isinstance(error, DoesNotFitError):
        raise InputError(f"{error}{_remedies(verdict.planner, request)}")
    if output is None:
        raise InputError("--force writes a plan that does not fit; say where with --output")
    from heteropp.description.plan import write_plan
    from heteropp.search.judge import judge_nearest

    nearest = judge_nearest(verdict.planner, error, request.cluster)
    write_plan(nearest.plan, output)
    if json:
        forced = replace(verdict, judged=[nearest])
        print(json_.dumps({**as_dict(forced), "output": str(output)}, indent=2))
        return
    say(
        Console(stderr=True, highlight=False, markup=False),
        f"{error}; written to {output} all the same",
    )


def _remedies(name: str, request: Request) -> str:
    """What would make the request possible, the least change first."""
    from heteropp.search.nearest import remedies

    with Status("looking for the nearest request that has a plan"):
        found = list(islice(remedies(request, name), REMEDIES))
    if not found:
        return "; no single change that is known makes it possible"
    return "; possible: " + ", or ".join(f"{each.what} ({each.option})" for each in found)


def _changed(cluster: Cluster, text: str) -> Cluster:
    """Returns the cluster with a change that --what-if names. Raises InputError."""
    from heteropp.search.what_if import changed, parse

    try:
        return changed(cluster, parse(text))
    except SearchError as error:
        raise InputError(str(error)) from None


def _ask_elsewhere(text: str, cluster: Cluster, name: str, request: Request) -> Verdict:
    """The same request on a changed cluster."""
    from heteropp.search.judge import ask

    with Status(f"searching with {text}"):
        return ask(name, replace(request, cluster=cluster))


def _show_elsewhere(
    console: Console, text: str, cluster: Cluster, verdict: Verdict, before: Verdict
) -> None:
    if not verdict.judged:
        say(console, f"with {text}: {verdict.error}")
        return
    now = verdict.best.simulation
    time_change = rate_change = ""
    if before.judged:
        then = before.best.simulation
        time_change = f" ({now.step_s / then.step_s - 1:+.1%})"
        rate_change = f" ({now.tokens_per_s / then.tokens_per_s - 1:+.1%})"
    say(
        console,
        f"with {text} ({cluster.world_size} chips): {seconds(now.step_s)}{time_change}, "
        f"{now.tokens_per_s:,.0f} tokens per second{rate_change}: {outline(verdict.best.plan)}",
    )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
