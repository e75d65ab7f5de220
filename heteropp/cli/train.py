"""heteropp-train: trains a model as a plan says, on this machine's chips or by a launcher."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from heteropp.api.training.options import OUTPUT, TrainingOptions
from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from hyperhetero.cli import CommandLine, output_folder
from hyperhetero.input import LONGEST_WAIT_S

OPTIONS = tuple(field.name for field in fields(TrainingOptions))

app = CommandLine()

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
            from heteropp.api.training.resume import run_to_resume

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
        int | None, typer.Option(min=1, help="With --bucket: documents of an optimizer step.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="The cluster file of the plan.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Times that heteropp-profile measured: what the run expects of its steps, in "
            "place of what the chip files say."
        ),
    ] = None,
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
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="A token file or folder for the validation loss, not trained on; several times, "
            "wiki=wiki.tokens, for a loss of each, which is called as its file where it has no "
            "name.",
            rich_help_panel=DATA,
        ),
    ] = None,
    validate_every: Annotated[
        int,
        typer.Option(
            min=0, help="Steps between validations; 0: only at the end.", rich_help_panel=DATA
        ),
    ] = 0,
    attention_within: Annotated[
        str | None,
        typer.Option(
            help="Where attention stays when a sequence has several documents: document or "
            "sequence; a document if absent and --data are conversations, otherwise a sequence.",
            rich_help_panel=DATA,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A Hugging Face folder whose weights to start from; without it they are drawn "
            "from the seed. Not read on --resume.",
            rich_help_panel=DATA,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[
        Path, output_folder("--output", "-o", help="Where everything is written.")
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
            min=5,
            max=LONGEST_WAIT_S,
            help="Seconds that a rank waits for another.",
            rich_help_panel=CHECKPOINTS,
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
            max=LONGEST_WAIT_S,
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
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="adamw, or muon for the blocks' matrices and AdamW for all else; as the plan "
            "says if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The highest learning rate; 1e-3 if absent.", rich_help_panel=OPTIMIZER),
    ] = None,
    learning_rate_schedule: Annotated[
        str | None,
        typer.Option(
            "--learning-rate-schedule",
            "--lr-schedule",
            help="The learning rate after the warm-up: cosine or linear (to the minimum, all the "
            "way), constant, or wsd (stable, and a linear decay in the end); cosine if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps until the learning rate is at its highest; 10 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    decay_steps: Annotated[
        int | None,
        typer.Option(
            help="Where the learning rate's decay ends; --steps if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    cooldown_steps: Annotated[
        int | None,
        typer.Option(
            help="How many of the last --decay-steps wsd decays in; a tenth of them if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    minimum_ratio: Annotated[
        float | None,
        typer.Option(
            help="The part of --learning-rate at which the decay ends; 0.1 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    gradient_clip: Annotated[
        float | None,
        typer.Option(
            help="The largest global gradient norm; 0: no clipping; 1 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(
            help="Weight decay of all but norms and biases; 0.1 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    expert_bias_update_rate: Annotated[
        float | None,
        typer.Option(
            help="How far a step moves the bias of each expert, up below the mean load and down "
            "above it, in models whose routers have one; 0: not at all; 0 if absent.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN:SETTINGS",
            help="Settings of the parameters whose names fit a pattern, several times: "
            "'embedding*:learning_rate=0.1x,weight_decay=0'. Of several that fit, the first "
            "counts.",
            rich_help_panel=OPTIMIZER,
        ),
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
        int,
        typer.Option(
            min=0,
            help="Seed of the initial weights and of the order of the data.",
            rich_help_panel=DATA,
        ),
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
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Hand the metrics to tensorboard, wandb or mlflow, too; repeatable.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve the newest metrics to Prometheus on this port; 0: any free one."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="The address of --metrics-port.")] = "127.0.0.1",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    values = {name: value for name, value in locals().items() if name in context.params}
    with one_sentence():
        from heteropp.api.training.run import run_training

        options = TrainingOptions(**{name: values[name] for name in OPTIONS})
        raise typer.Exit(run_training(options, given(context, values)))


def given(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the command line names, or the run that it goes on with.

    values: of all, as the command has them: not every typer converts the context's own.
    """
    sources = {name: context.get_parameter_source(name) for name in values}
    names = ("COMMANDLINE", "DEFAULT_MAP")
    return {
        name: values[name] for name, source in sources.items() if source and source.name in names
    }


def main() -> None:
    app()


if __name__ == "__main__":
    main()
