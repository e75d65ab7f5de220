"""heteropp-export: writes a checkpoint's model as a Hugging Face folder, for transformers to load.

Any plan's checkpoint will do, and no plan is asked for. Of a model with LoRA it writes the adapter,
for peft to load.
"""

from __future__ import annotations

import json as json_
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from hyperhetero.cli import CommandLine, output_folder
from hyperhetero.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from heteropp.models.spec import ModelSpec
    from heteropp.state.checkpoint.manifest import Checkpoint

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-export runs/train --output my-llama --from Llama-3.2-1B
  heteropp-export runs/train/checkpoints/step-000060 --output my-llama
  heteropp-export runs/lora --output my-adapter --from Qwen3-8B
  heteropp-export runs/lora --output my-qwen --from Qwen3-8B --merged
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def export_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder, for its newest checkpoint, or a step's.")
    ],
    output: Annotated[
        Path, output_folder("--output", "-o", help="The folder to write; it must be new.")
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="The Hugging Face folder that the training started from: its tokenizer goes "
            "along, and its config.json is kept.",
        ),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="The whole model, LoRA added in, in place of the adapter."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    with one_sentence():
        found = _find(checkpoint)
        model = _model(found, source, trust_remote_code)
        _export(found, model, output, source, merged)
    step = found.manifest.step
    size_bytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    if json:
        result = {"step": step, "model": asdict(model), "weights_bytes": size_bytes}
        print(json_.dumps(result, indent=2))
        return
    from heteropp.cost.planned import human_bytes

    what = "model" if merged or model.base() is model else "LoRA of model"
    print(
        f"{output} holds {what} {model.name} as of step {step}: "
        f"{human_bytes(size_bytes)} of weights in {model.dtype}"
    )


def _find(path: Path) -> Checkpoint:
    """The checkpoint that a folder is, or the newest of its run. Raises InputError or FileError."""
    from heteropp.state.checkpoint.manifest import MANIFEST, find, read

    if (path / MANIFEST).exists():
        return read(path)
    found = find(path / "checkpoints") or find(path)
    if found is None:
        raise InputError(f"{path} holds no checkpoint")
    return found


def _model(checkpoint: Checkpoint, source: Path | None, trust_remote_code: bool) -> ModelSpec:
    """Returns a checkpoint's model, whose code, where it has some, is in `source` by now.

    Raises InputError.
    """
    from heteropp.api.given import allow_code
    from heteropp.models.hugging_face.model import HuggingFaceModel

    model = checkpoint.manifest.model
    if source is not None and isinstance(model, HuggingFaceModel):
        model = model.with_code_in(source)
    allow_code(model, trust_remote_code)
    return model


def _export(
    checkpoint: Checkpoint, model: ModelSpec, output: Path, source: Path | None, merge: bool
) -> None:
    """Raises InputError or FileError."""
    from heteropp.layout.boxes import Box
    from heteropp.models.hugging_face.model import HuggingFaceModel
    from heteropp.models.spec import Parameter
    from heteropp.state.checkpoint.manifest import CheckpointError
    from heteropp.state.checkpoint.reader import Reader
    from heteropp.state.hugging_face.export import export

    reader = Reader(checkpoint)
    if merge and model.base() is model:
        raise InputError(f"--merged is for a model with LoRA; {checkpoint.path} has none")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("writing", total=len(model.parameters()))

        def read(parameter: Parameter) -> Tensor:
            progress.advance(task)
            return reader.read("value", parameter.name, Box.whole(parameter.shape))

        try:
            if isinstance(model, HuggingFaceModel) and model.lora is not None:
                from heteropp.state.hugging_face.adapter import export_adapter, merged

                if not merge:
                    export_adapter(model, read, output, source)
                    return
                export(model.base(), merged(model, read), output, source)
                return
            export(model, read, output, source)
        except CheckpointError as error:
            raise InputError(str(error)) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
