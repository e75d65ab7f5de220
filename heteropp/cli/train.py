"""heteropp-train: trains a model as a plan says, on this machine's chips or under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from heteropp.cli.errors import InputError, one_sentence
from heteropp.cli.starts import keep_start
from heteropp.cli.tools import leave_tools_to_ranks
from heteropp.cli.train_checks import (
    check_elastic,
    check_files,
    check_finite,
    check_not_elastic,
    check_p2p,
    check_runs,
    check_tensorboard,
    check_unused,
    chip_of,
    choose_chip,
    chosen_hyperparameters,
    cluster_of,
    hold,
    plan_files,
)
from heteropp.description.plan import Plan, read_plan

if TYPE_CHECKING:
    from heteropp.cli.elastic import Earlier
    from heteropp.state.checkpoint.manifest import Checkpoint

OUTPUT = Path("runs/train")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-train --plan plan.json --cluster cluster.toml --steps 60
  heteropp-train --resume runs/train
  heteropp-train --resume runs/train --steps 90 --plan another.json
  heteropp-train --plan plan.json --cluster cluster.toml --from Llama-3.2-1B
  heteropp-train --plan plan.json --cluster cluster.toml --elastic \\
    --availability chips.json --remote s3://bucket/run
  heteropp-train --bucket 1024.json --bucket 8192.json --documents 500 ...
  torchrun --nnodes 2 ... -m heteropp.cli.train --plan plan.json ...
"""


# sections of --help
DATA, CHECKPOINTS, OPTIMIZER = "Data and weights", "Checkpoints and failures", "Optimizer"
ELASTIC = "When the cluster changes"


class Resumable(TyperCommand):
    """Takes what the command line leaves out from the run that it goes on with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if not said.get("help"):
            from heteropp.cli.resume import run_to_resume

            with one_sentence():
                ctx.default_map = run_to_resume(said, OUTPUT)
        return super().parse_args(ctx, args)


@app.command(cls=Resumable, help=__doc__, epilog=EXAMPLES)
def train(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="With --resume: the run to go on with. Its plan, cluster, data and options are "
            "in its folder; those that are given replace them.",
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="What heteropp-search wrote.")] = None,
    bucket: Annotated[
        list[Path] | None,
        typer.Option(
            help="In place of --plan, several times: a plan for each length of sequence. A "
            "document goes, whole, to the shortest that holds it; attention keeps it apart from "
            "others."
        ),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Those of an optimizer step, with --bucket.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="The cluster file of the plan.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 60,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A token file of heteropp-data, or a folder of text, a token a byte; "
            "the Python standard library's sources if absent.",
            rich_help_panel=DATA,
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="A token file or folder for the validation loss; not trained on.",
            rich_help_panel=DATA,
        ),
    ] = None,
    validate_every: Annotated[
        int,
        typer.Option(
            min=0, help="Steps between validations; 0: only at the end.", rich_help_panel=DATA
        ),
    ] = 0,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A Hugging Face folder whose weights to start from; without it they are drawn "
            "from the seed. Not read on --resume.",
            rich_help_panel=DATA,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where everything is written.")
    ] = OUTPUT,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint, whatever its plan was; of FOLDER, or --output.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Go on from this step's checkpoint; later ones are set aside.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps between checkpoints; 0: only at the end.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = 0,
    keep: Annotated[
        int, typer.Option(min=1, help="How many checkpoints to keep.", rich_help_panel=CHECKPOINTS)
    ] = 2,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often to start all ranks again from the newest checkpoint when one fails; "
            "under torchrun give it --max-restarts.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = 0,
    deadline: Annotated[
        float,
        typer.Option(
            min=5, help="Seconds that a rank waits for another.", rich_help_panel=CHECKPOINTS
        ),
    ] = 300,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on, under a new plan, when chips go or come.",
            rich_help_panel=ELASTIC,
        ),
    ] = False,
    availability: Annotated[
        str | None,
        typer.Option(
            help='A file or URL that says which chips there are, {"a-0": 2, "b-0": 1} by node, as '
            "JSON or TOML; read every few seconds. All of --cluster if absent.",
            rich_help_panel=ELASTIC,
        ),
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option(
            help="Under torchrun, one process a node: the name of this node, a-0 for the first of "
            "chip a.",
            rich_help_panel=ELASTIC,
        ),
    ] = None,
    notice: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds that a chip still has when it goes from --availability or its process "
            "gets SIGTERM.",
            rich_help_panel=ELASTIC,
        ),
    ] = 30,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Where each node keeps snapshots of its state, on a disk of its own; the folder "
            "copies in --output if absent. They are in a folder that is called as --output's "
            "job.json says, and stay there for --resume unless the run comes to its end.",
            rich_help_panel=ELASTIC,
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="Where snapshots go that outlive every node: a folder or URL, as fsspec takes it. "
            "They are called and stay as those on the disk.",
            rich_help_panel=ELASTIC,
        ),
    ] = None,
    keep_memory_every: Annotated[
        int,
        typer.Option(
            min=1, help="Steps between snapshots in host memory.", rich_help_panel=ELASTIC
        ),
    ] = 1,
    keep_disk_every: Annotated[
        int,
        typer.Option(
            min=0, help="Steps between snapshots on the disk; 0: none.", rich_help_panel=ELASTIC
        ),
    ] = 10,
    keep_remote_every: Annotated[
        int,
        typer.Option(min=1, help="Steps between snapshots in --remote.", rich_help_panel=ELASTIC),
    ] = 50,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest that it gets; 1e-3 if absent.", rich_help_panel=OPTIMIZER),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="Until the learning rate is at its highest; 10 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    decay_steps: Annotated[
        int | None,
        typer.Option(
            help="Where the learning rate's cosine ends; --steps if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    gradient_clip: Annotated[
        float | None,
        typer.Option(help="Largest global norm; 0: none; 1 if absent.", rich_help_panel=OPTIMIZER),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="AdamW's; 0.1 if absent.", rich_help_panel=OPTIMIZER)
    ] = None,
    most_skipped: Annotated[
        int | None,
        typer.Option(
            help="Steps in a row that may be skipped, because loss or gradient are not finite, "
            "before the run stops; 10 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    spike_factor: Annotated[
        float | None,
        typer.Option(
            help="Warn of a loss or gradient norm so many times its recent median; 0: never; "
            "10 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    skip_spikes: Annotated[
        bool | None,
        typer.Option(
            "--skip-spikes/--no-skip-spikes",
            help="Skip such steps instead of only warning.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the weights and the batches.", rich_help_panel=DATA)
    ] = 0,
    device: Annotated[
        str, typer.Option(help="chip, or cpu to run without chips, over gloo.")
    ] = "chip",
    p2p: Annotated[
        str | None,
        typer.Option(
            help="How tensors go from stage to stage: device-direct, or cpu-mediated through host "
            "memory; as DICOMM_STRATEGY says if absent."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Skip the memory check.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the metrics for TensorBoard, too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    settings = {
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "gradient_clip": gradient_clip,
        "weight_decay": weight_decay,
        "most_skipped": most_skipped,
        "spike_factor": spike_factor,
        "skip_spikes": skip_spikes,
    }
    launched = "RANK" in os.environ  # by torchrun, which started every rank itself
    keeps = int(os.environ.get("RANK", "0")) == 0  # the process that has the run's folder
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the ranks say what there is to say
    with one_sentence():
        check_finite({"--deadline": deadline, "--notice": notice})
        if validate_every and validation is None:
            raise InputError("--validate-every needs --validation, the data to try the model on")
        files = plan_files(plan, bucket, documents)
        by_length: tuple[Plan, ...] = ()
        if bucket:
            from heteropp.cli.mixed_lengths import read_buckets, say_documents

            by_length = read_buckets(bucket)
        content = by_length[0] if by_length else read_plan(files[0])
        earlier: Earlier | None = None
        begun = False  # by torchrun, which starts it again
        if elastic:
            from heteropp.cli.elastic import earlier_job, job_goes_on

            check_elastic(cluster, bucket, resume_from, restarts, force)
            begun = job_goes_on(output)
        else:
            check_not_elastic(given(context))
        start = 0
        if launched and not elastic:
            choose_chip(content, cluster, int(os.environ["RANK"]))  # before torch is imported
            from heteropp.runtime.ranks.attempt import attempt

            start = attempt()
            begun = start > 0
        there = output.exists()
        if keeps and there:  # who has it is said before what is in it
            hold(context, output, begun)
        if elastic:
            earlier = earlier_job(output, resume)
        if launched and restarts:
            raise InputError("--restarts is not for torchrun's ranks; give it --max-restarts")
        check_p2p(p2p, device)
        check_tensorboard(tensorboard)
        if elastic:
            pass  # this process has no chip
        elif launched and device == "chip":
            open_chip()
        elif device == "chip":
            leave_tools_to_ranks()
        machines = None
        if not elastic:
            machines = cluster_of(by_length or (content,), cluster, device, force)
        for file in files:
            check_runs(content, file, launched and not elastic)
        saved: Checkpoint | None = None
        if not earlier and (resume or resume_from is not None):
            from heteropp.cli.resume import checkpoint_to_resume

            step = None if start else resume_from  # ranks that start again take the newest
            saved = checkpoint_to_resume(output / "checkpoints", step, whole=not launched)
        base = earlier or (saved.manifest if saved else None)
        hyperparameters = chosen_hyperparameters(
            base.hyperparameters if base else None, steps, settings
        )
        if not launched:
            if not (saved or earlier):
                check_unused(output)
            tokens = check_files(
                content,
                by_length,
                documents,
                output,
                saved,
                data,
                validation,
                hyperparameters,
                seed,
            )
            if by_length:
                print(say_documents(tokens, by_length), file=sys.stderr)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # one process of each node
            from heteropp.cli.verifying import verify_data

            verify_data(data, validation)
        if weights and not saved:
            from heteropp.state.hugging_face.weights import check_from

            check_from(weights, content.model)
        if keeps and not there:
            hold(context, output, begun)
        read = cluster if machines or elastic else None
        if keeps and not begun:
            keep_start(output, given(context), by_length or (content,), read, seed, hyperparameters)

    from heteropp.runtime.train import train_rank  # torch is a second's import
    from heteropp.runtime.training_run import RankChip, TrainingRun
    from heteropp.simulator.expectation import expected_step

    run = TrainingRun(
        plan=content,
        cluster=cluster if machines or (elastic and device == "chip") else None,
        chips=tuple(
            RankChip(str(machines.chip(rank).path), machines.chip(rank).chip_type)
            if machines
            else RankChip(chip_of(content, rank), chip_of(content, rank))
            for rank in range(content.world_size)
        ),
        steps=steps,
        output=output,
        data=data,
        validation=validation,
        validate_every=validate_every,
        weights=weights,
        resume=saved is not None,
        resume_from=resume_from,
        checkpoint_every=checkpoint_every,
        keep=keep,
        deadline_s=deadline,
        seed=seed,
        hyperparameters=hyperparameters,
        device=device,  # type: ignore[arg-type]
        p2p=p2p,  # type: ignore[arg-type]
        tensorboard=tensorboard,
        by_length=by_length,
        documents=documents or 0,
    )
    if elastic:
        from heteropp.cli.elastic import Elastic, train_elastically

        assert cluster is not None
        options = Elastic(
            cluster=cluster,
            node_name=node_name,
            availability=availability,
            notice_s=notice,
            disk=disk,
            remote=remote,
            keep_memory_every=keep_memory_every,
            keep_disk_every=keep_disk_every,
            keep_remote_every=keep_remote_every,
        )
        with one_sentence():
            raise typer.Exit(train_elastically(run, options, earlier, quiet=json))
    if launched:
        train_rank(run, json, expected_step)
        return
    from heteropp.runtime.ranks.launch import launch
    from heteropp.state.checkpoint.writer import remove_partial

    with one_sentence():
        code = launch(
            train_rank, run, json, expected_step,
            labels=run.labels, logs=run.logs, restarts=restarts,
        )  # fmt: skip
    remove_partial(run.checkpoints)  # a full disk has room again
    raise typer.Exit(code)


def open_chip() -> None:
    """Imports ditorch before the first backward, when autograd counts devices once for all.

    Raises InputError.
    """
    try:
        import ditorch  # noqa: F401
    except ImportError as error:
        raise InputError(str(error)) from None


def given(context: typer.Context) -> dict[str, Any]:
    """The parameters that the command line names, or the run that it goes on with."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names = ("COMMANDLINE", "DEFAULT_MAP")
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source and source.name in names
    }


def main() -> None:
    app()


if __name__ == "__main__":
    main()
