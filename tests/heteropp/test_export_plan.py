"""Plans as other frameworks' files, read by those frameworks' own code."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from installed import lack
from sampled import sampled

from heteropp.description.model import read_model
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan
from heteropp.frameworks.flagscale import to_flagscale
from heteropp.frameworks.megatron import to_megatron
from heteropp.frameworks.torchtitan import to_torchtitan

ROOT = Path(__file__).parents[2]

# --- plans --------------------------------------------------------------------------------------


def stage(layers, chip, first, dp, tp, **settings):
    ranks = [tuple(range(first + r * tp, first + r * tp + tp)) for r in range(dp)]
    replicas = tuple(Replica(ranks=own, chip=chip, batch_share=8 // dp) for own in ranks)
    settings.setdefault("sequence_parallel", tp > 1)
    return Stage(layers=layers, replicas=replicas, **{"recompute": False, "slack": 0} | settings)


def three_vendors(**settings):
    """What heteropp-search finds for Llama-3-8B on 4 x 8 H20, 2 x 8 A100 and 8 Ascend 910B."""
    stages = (
        stage((0, 15), "h20", 0, 8, 4, slack=1),
        stage((15, 22), "ascend-910b", 48, 8, 1, slack=2),
        stage((22, 32), "a100", 32, 8, 2, slack=2),
    )
    plan = Plan(
        model=read_model("llama-3-8b"),
        global_batch=512,
        micro_batch=8,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=64, stages=stages),),
    )
    return replace(plan, **settings)


def alike(count=4, **settings):
    """Stages of two layers in two ministages each."""
    stages = tuple(
        stage((2 * s, 2 * s + 2), "a100", 4 * s, 2, 2, ministages=2) for s in range(count)
    )
    plan = Plan(
        model=replace(read_model("llama-3-8b"), layers=2 * count),
        global_batch=64,
        micro_batch=8,
        schedule="interleaved-1f1b",
        zero_stage=0,
        pipelines=(Pipeline(micro_batches=8, stages=stages),),
    )
    return replace(plan, **settings)


def export(plan, to, folder, name):
    """Returns the file, and what was replaced."""
    written = {"megatron": to_megatron, "flagscale": to_flagscale, "torchtitan": to_torchtitan}[to](
        plan
    )
    (folder / name).write_text(written.text)
    return folder / name, "\n".join(f"{one.what}: {one.by}" for one in written.replacements)


def command(plan, to, folder, *options):
    """Runs the command itself."""
    write_plan(plan, folder / "plan.json")
    program = [sys.executable, "-m", "heteropp.cli.export_plan", str(folder / "plan.json")]
    return subprocess.run([*program, "--to", to, *options], capture_output=True, text=True)


# --- Megatron-LM --------------------------------------------------------------------------------

# of its arguments (megatron/training/arguments.py), with their types
INTEGERS = (
    "num-layers",
    "hidden-size",
    "seq-length",
    "vocab-size",
    "make-vocab-size-divisible-by",
    "ffn-hidden-size",
    "num-attention-heads",
    "max-position-embeddings",
    "rotary-base",
    "num-query-groups",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "recompute-num-layers",
)
FLOATS = ("norm-epsilon", "attention-dropout", "hidden-dropout", "rope-scaling-factor")
FLAGS = (
    "swiglu",
    "disable-bias-linear",
    "group-query-attention",
    "untie-embeddings-and-output-weights",
    "bf16",
    "fp16",
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-rope-scaling",
)
CHOICES = {
    "position-embedding-type": ["learned_absolute", "rope", "mrope", "yarn", "relative", "none"],
    "normalization": ["LayerNorm", "RMSNorm"],
    "attention-backend": ["flash", "fused", "unfused", "local", "auto"],
    "recompute-granularity": ["full", "selective"],
    "recompute-method": ["uniform", "block"],
    "optimizer": ["adam", "sgd", "muon", "dist_muon"],
}


def megatron_arguments(path):
    """What a shell has after `source`, as Megatron-LM's parser reads it."""
    command = f'source {path}; printf "%s\\0" "${{PLAN_ARGUMENTS[@]}}"'
    found = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in INTEGERS:
        parser.add_argument(f"--{name}", type=int)
    for name in FLOATS:
        parser.add_argument(f"--{name}", type=float)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--recompute-modules", nargs="*")
    return parser.parse_args(found.stdout.split("\0")[:-1])


def megatron_config(arguments):
    """Megatron's own configuration of the arguments."""
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups,
        ffn_hidden_size=arguments.ffn_hidden_size,
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        pipeline_model_parallel_layout=arguments.pipeline_model_parallel_layout,
        pipeline_dtype=torch.bfloat16,
        sequence_parallel=arguments.sequence_parallel,
        normalization=arguments.normalization,
        recompute_granularity=arguments.recompute_granularity,
        recompute_method=arguments.recompute_method,
        recompute_num_layers=arguments.recompute_num_layers,
        recompute_modules=arguments.recompute_modules,
    )


def layers_by_stage(config):
    """Decoder layers of every stage, by ministage."""
    from megatron.core.transformer.enums import LayerType

    layout = config.pipeline_model_parallel_layout.layout
    return [[part.count(LayerType.decoder) for part in own] for own in layout]


# tools/peers installs the frameworks there, apart from what everything else runs with
PEERS = Path(os.environ.get("HYPERHETERO_PEERS", ROOT / "build/peers"))


@pytest.fixture
def megatron(monkeypatch):
    monkeypatch.syspath_prepend(PEERS)
    if not find_spec("megatron"):
        lack("megatron-core is not installed", "tools/peers")


def test_megatron_has_every_chip_in_stages_of_equal_degrees(tmp_path, megatron):
    path, said = export(three_vendors(), "megatron", tmp_path, "plan.sh")
    arguments = megatron_arguments(path)
    config = megatron_config(arguments)
    assert layers_by_stage(config) == [[4], [4], [4], [3], [7], [5], [5]]
    assert config.tensor_model_parallel_size * config.pipeline_model_parallel_size * 2 == 56
    assert arguments.global_batch_size == 512
    assert arguments.use_distributed_optimizer and arguments.sequence_parallel
    assert (arguments.vocab_size, arguments.num_query_groups) == (128256, 8)
    for replaced in ("slack 1, 2, 2", "stage 0 with dp 8 tp 4", "chips of several types"):
        assert replaced in said
        assert replaced in path.read_text()


def test_the_command_writes_the_file_and_shows_what_was_replaced(tmp_path):
    ended = command(three_vendors(), "megatron", tmp_path, "--output", str(tmp_path / "plan.sh"))
    assert ended.returncode == 0, ended.stderr
    assert "slack 1, 2, 2" in ended.stdout
    written = (tmp_path / "plan.sh").read_text()
    assert command(three_vendors(), "megatron", tmp_path).stdout == written


def test_megatron_interleaves_ministages(tmp_path, megatron):
    path, said = export(alike(), "megatron", tmp_path, "plan.sh")
    config = megatron_config(megatron_arguments(path))
    assert layers_by_stage(config) == [[1, 1]] * 4
    assert config.virtual_pipeline_model_parallel_size == 2
    assert not said


@pytest.mark.parametrize("schedule", sampled(["zb-v", "chimera"], 1, everyday=1))
def test_megatron_runs_1f1b_in_place_of_a_schedule_that_it_lacks(tmp_path, megatron, schedule):
    path, said = export(alike(schedule=schedule), "megatron", tmp_path, "plan.sh")
    assert layers_by_stage(megatron_config(megatron_arguments(path))) == [[2]] * 4
    assert f"schedule {schedule}" in said and "1F1B" in said


def test_megatron_recomputes_everywhere_what_one_stage_does(tmp_path, megatron):
    plan = three_vendors()
    stages = plan.pipelines[0].stages
    some = (replace(stages[0], recompute=True), *stages[1:])
    plan = replace(plan, pipelines=(Pipeline(micro_batches=64, stages=some),))
    path, said = export(plan, "megatron", tmp_path, "plan.sh")
    config = megatron_config(megatron_arguments(path))
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert "full recompute on some stages, not on 1-2" in said


def test_megatron_has_gpt2(tmp_path, megatron):
    model = read_model("gpt2")
    pipeline = Pipeline(micro_batches=1, stages=(stage((0, model.layers), "a100", 0, 4, 1),))
    plan = three_vendors(model=model, pipelines=(pipeline,), global_batch=8)
    path, _ = export(plan, "megatron", tmp_path, "plan.sh")
    arguments = megatron_arguments(path)
    assert arguments.position_embedding_type == "learned_absolute"
    assert not arguments.untie_embeddings_and_output_weights
    assert arguments.pipeline_model_parallel_layout is None


def test_pipelines_become_replicas_of_one(tmp_path, megatron):
    one = three_vendors().pipelines[0].stages
    halves = [
        Pipeline(
            micro_batches=count,
            stages=tuple(replace(s, replicas=s.replicas[half]) for s in one),
        )
        for half, count in ((slice(0, 4), 40), (slice(4, 8), 24))
    ]
    plan = three_vendors(pipelines=tuple(halves), micro_batch=4, global_batch=256)
    path, said = export(plan, "megatron", tmp_path, "plan.sh")
    arguments = megatron_arguments(path)
    assert layers_by_stage(megatron_config(arguments)) == [[4], [4], [4], [3], [7], [5], [5]]
    assert "pipelines of 40, 24 micro-batches" in said
    assert "2 pipelines" in said


def test_pipelines_that_are_cut_differently_are_cut_anew(tmp_path, megatron):
    long = tuple(stage((8 * s, 8 * s + 8), "a100", 2 * s, 1, 2) for s in range(4))
    short = tuple(stage((16 * s, 16 * s + 16), "h20", 8 + 4 * s, 1, 4) for s in range(2))
    pipelines = tuple(Pipeline(micro_batches=4, stages=own) for own in (long, short))
    plan = three_vendors(pipelines=pipelines, global_batch=64)
    path, said = export(plan, "megatron", tmp_path, "plan.sh")
    arguments = megatron_arguments(path)
    assert layers_by_stage(megatron_config(arguments)) == [[8]] * 4
    assert arguments.tensor_model_parallel_size == 2
    assert "2 pipelines that are cut differently" in said


@pytest.mark.parametrize("turn", [1, -1])
def test_what_one_of_several_pipelines_has_is_named_whichever_comes_first(tmp_path, turn):
    plain = {"sequence_parallel": False}
    rich = {"sequence_parallel": True, "slack": 1, "recompute": True}
    pipelines = tuple(
        Pipeline(
            micro_batches=4,
            stages=tuple(
                stage((16 * s, 16 * s + 16), "a100", 8 * p + 4 * s, 1, 4, **settings)
                for s in range(2)
            ),
        )
        for p, settings in enumerate((plain, rich))
    )
    plan = three_vendors(pipelines=pipelines[::turn], global_batch=64)
    path, said = export(plan, "megatron", tmp_path, "plan.sh")
    text = path.read_text()
    assert "--sequence-parallel" in text and "--recompute-granularity full" in text
    assert "recompute in some pipelines: in all of them" in said
    assert said.count("sequence parallelism on some stages: on every stage") == 1
    assert ("slack 0, 0, 1, 1" if turn == 1 else "slack 1, 1, 0, 0") in said


# --- torchtitan ---------------------------------------------------------------------------------

READ = """
import json, sys
import torch
from torchtitan.config.manager import ConfigManager
from torch.distributed.pipelining.schedules import get_schedule_class
config = ConfigManager().parse_args(["--module", "exported", "--config", "plan"])
p = config.parallelism
with torch.device("meta"):
    model = config.model_spec.model.build()
    names = {name for name, _ in model.named_modules()}
print(json.dumps({
    "elements": sum(each.numel() for each in model.parameters()),
    "degrees": [p.pipeline_parallel_degree, p.data_parallel_shard_degree,
                p.data_parallel_replicate_degree, p.tensor_parallel_degree],
    "schedule": get_schedule_class(p.pipeline_parallel_schedule).__name__,
    "layers": [sum(name.startswith("layers.") for name in part)
               for part in p.module_fqns_per_model_part],
    "unknown": [n for part in p.module_fqns_per_model_part for n in part if n not in names],
    "batches": [config.training.local_batch_size, p.pipeline_parallel_microbatch_size,
                config.training.global_batch_size],
    "recompute": type(config.activation_checkpoint).__qualname__,
}))
"""


def titan(path):
    """What torchtitan's own parser makes of the module, and its model without memory."""
    if not (PEERS / "torchtitan").is_dir():
        lack("torchtitan is not installed", "tools/peers")
    environment = {**os.environ, "PYTHONPATH": f"{path.parent}{os.pathsep}{PEERS}"}
    ended = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.long
def test_torchtitan_reads_the_plan(tmp_path):
    plan = three_vendors()
    path, said = export(plan, "torchtitan", tmp_path, "exported.py")
    read = titan(path)
    assert read["elements"] == plan.model.elements()
    assert read["degrees"] == [7, 2, 1, 4]
    assert read["schedule"] == "Schedule1F1B"
    assert read["layers"] == [4, 4, 4, 3, 7, 5, 5]
    assert read["unknown"] == []
    assert read["batches"] == [256, 1, 512]
    assert "ZeRO stage 1" in said


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    sampled(
        [("zb-v", "ScheduleZBVZeroBubble"), ("interleaved-1f1b", "ScheduleInterleaved1F1B")], 2
    ),
)
def test_torchtitan_has_schedules_with_ministages(tmp_path, schedule, theirs):
    plan = alike(schedule=schedule)
    stages = tuple(replace(s, recompute=True) for s in plan.pipelines[0].stages)
    plan = replace(plan, pipelines=(Pipeline(micro_batches=8, stages=stages),))
    path, said = export(plan, "torchtitan", tmp_path, "exported.py")
    read = titan(path)
    assert read["schedule"] == theirs
    assert read["layers"] == [1] * 8
    assert read["degrees"] == [4, 1, 2, 2]
    assert read["recompute"].startswith("FullAC")
    assert f"schedule {schedule}" not in said


def test_torchtitan_takes_no_other_family(tmp_path):
    model = read_model("gpt2")
    pipeline = Pipeline(micro_batches=1, stages=(stage((0, model.layers), "a100", 0, 4, 1),))
    plan = three_vendors(model=model, pipelines=(pipeline,), global_batch=8)
    ended = command(plan, "torchtitan", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("torchtitan's export is for family llama")
    assert len(ended.stderr.splitlines()) == 1


# --- FlagScale ----------------------------------------------------------------------------------


def flagscale(path):
    """The file, after the checks that FlagScale makes of it before it runs."""
    read = yaml.safe_load(Path(path).read_text())
    system, model, hetero = read["system"], read["model"], read["system"]["hetero"]
    flat = hetero["hetero_process_meshes"]
    meshes = [flat[i : i + 5] for i in range(0, len(flat), 5)]
    assert len(flat) % 5 == 0
    assert system["pipeline_model_parallel_size"] == sum(mesh[4] for mesh in meshes)
    assert len(hetero["hetero_pipeline_layer_split"]) == system["pipeline_model_parallel_size"]
    assert sum(hetero["hetero_pipeline_layer_split"]) == model["num_layers"]
    assert len(hetero["hetero_device_types"]) == len(meshes)
    assert hetero["hetero_current_device_type"] in hetero["hetero_device_types"]
    whole = meshes[0][3] * model["micro_batch_size"]
    assert not any(whole % mesh[3] for mesh in meshes)
    assert model["global_batch_size"] % whole == 0
    # ranks are sorted by the first place of their type: a type comes in one run
    types = hetero["hetero_device_types"]
    assert [t for i, t in enumerate(types) if t not in types[:i]] == [
        t for i, t in enumerate(types) if i == 0 or t != types[i - 1]
    ]
    rows = system.get("recompute", {}).get("recompute_granularity_per_stage_micro_batch", [])
    assert not rows or sum(row[0] for row in rows) == system["pipeline_model_parallel_size"]
    assert all(row[1] == model["global_batch_size"] // whole for row in rows)
    return read, meshes


def test_flagscale_has_a_mesh_for_every_stage(tmp_path):
    path, said = export(three_vendors(), "flagscale", tmp_path, "plan.yaml")
    read, meshes = flagscale(path)
    assert meshes == [[4, 1, 1, 8, 1], [1, 1, 1, 8, 1], [2, 1, 1, 8, 1]]
    hetero = read["system"]["hetero"]
    assert hetero["hetero_pipeline_layer_split"] == [15, 7, 10]
    assert hetero["hetero_device_types"] == ["h20", "ascend-910b", "a100"]
    assert read["model"]["micro_batch_size"] == 1
    assert "slack 1, 2, 2" in said and "resharding all-gather" in said


def test_flagscale_recomputes_stage_by_stage(tmp_path):
    stages = (
        stage((0, 10), "a100", 0, 4, 2),
        stage((10, 20), "h20", 8, 2, 4, recompute=True),
        stage((20, 32), "a100", 16, 2, 2),
    )
    plan = three_vendors(pipelines=(Pipeline(micro_batches=64, stages=stages),))
    path, said = export(plan, "flagscale", tmp_path, "plan.yaml")
    read, _ = flagscale(path)
    assert read["system"]["recompute"] == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_granularity_per_stage_micro_batch": [[1, 64, 0], [1, 64, 1], [1, 64, 0]],
    }
    assert read["system"]["hetero"]["hetero_device_types"] == ["a100", "h20", "a100_2"]
    assert read["model"]["micro_batch_size"] == 2
    assert "recompute on" not in said


@pytest.mark.parametrize("to", ["megatron", "flagscale"])
@pytest.mark.parametrize(
    ("dtype", "argument"), [("float64", None), ("float32", None), ("float16", "fp16")]
)
def test_a_dtype_that_a_framework_lacks_is_said(tmp_path, to, dtype, argument):
    plan = three_vendors(model=replace(read_model("llama-3-8b"), dtype=dtype))
    path, said = export(plan, to, tmp_path, "plan")
    words = set(re.findall(r"[a-z]+\d+", path.read_text()))
    assert words & {"fp16", "bf16"} == ({argument} if argument else set())
    assert ("dtype float64: float32" in said) == (dtype == "float64")


# --- what cannot be exported --------------------------------------------------------------------


def test_a_stage_with_more_parts_than_layers_is_one_sentence(tmp_path):
    stages = (stage((0, 31), "a100", 0, 1, 1), stage((31, 32), "h20", 1, 4, 1))
    plan = three_vendors(pipelines=(Pipeline(micro_batches=64, stages=stages),))
    ended = command(plan, "megatron", tmp_path)
    assert ended.returncode == 2
    assert "stage 1 has 4 chips for 1 layers" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
