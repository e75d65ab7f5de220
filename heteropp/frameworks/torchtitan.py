"""A plan as a torchtitan configuration (0.3): a Python module that its --module takes."""

from __future__ import annotations

from typing import Any

from heteropp.description.plan import Plan
from heteropp.description.schedules import Schedule
from heteropp.frameworks.file import ExportError, FrameworkFile, Replacement, heading, rank_lines
from heteropp.frameworks.uniform import UniformJob, uniform
from heteropp.models.llama.model import LlamaModel

# torch.distributed.pipelining's; the last two run several ministages on each rank
SCHEDULES: dict[Schedule, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}
USE = (
    "Use: torchrun ... -m torchtitan.train --module NAME_OF_THIS_FILE --config plan, with this "
    "file's folder on PYTHONPATH; data set, tokenizer, learning rate and steps as its options."
)
MODULE = """\
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
{recompute_import}from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.trainer import Trainer

NORMAL = {{"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}}
ONES = {{"weight": nn.init.ones_}}


def model():
    rope = ComplexRoPE.Config({rope})
    norm = partial(RMSNorm.Config, normalized_shape={hidden}, eps={norm_eps}, param_init=ONES)
    return Llama3Model.Config(
        dim={hidden},
        vocab_size={vocab},
        tok_embeddings=Embedding.Config(
            num_embeddings={vocab}, embedding_dim={hidden}, param_init=NORMAL
        ),
        norm=norm(),
        lm_head=Linear.Config(in_features={hidden}, out_features={vocab}, param_init=NORMAL),
        layers=[
            Llama3TransformerBlock.Config(
                attention_norm=norm(),
                ffn_norm=norm(),
                attention=make_gqa_config(
                    dim={hidden},
                    n_heads={heads},
                    n_kv_heads={kv_heads},
                    wqkv_param_init=NORMAL,
                    wo_param_init=NORMAL,
                    inner_attention=get_attention_config("flex"),
                    fuse_qkv=True,
                    rope=rope,
                ),
                feed_forward=make_ffn_config(
                    dim={hidden},
                    hidden_dim={intermediate},
                    w1_param_init=NORMAL,
                    w2w3_param_init=NORMAL,
                ),
            )
            for _ in range({layers})
        ],
    )


def plan() -> Trainer.Config:
    spec = model_registry("debugmodel")  # what runs the model; its sizes follow
    spec.flavor = {name}
    spec.model = model()
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size={vocab})
        ),
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
{modules}        ),
{recompute}    )
"""


def to_torchtitan(plan: Plan) -> FrameworkFile:
    """Returns a Python module whose function `plan` gives the configuration. Raises ExportError."""
    model = plan.model
    if not isinstance(model, LlamaModel):
        raise ExportError(
            f"the model is of family {model.family}; torchtitan's export is for family llama"
        )
    if model.tied_embeddings:
        raise ExportError("embedding and head are tied; torchtitan's Llama has them apart")
    job = uniform(plan, SCHEDULES)
    found = list(job.replacements)
    kinds = {"full": "FullAC", "selective": "SelectiveAC"}
    kind = kinds[job.recompute] if job.recompute else None
    if job.recompute == "selective":
        found.append(
            Replacement("recompute of attention's scores", "SelectiveAC, which chooses operators")
        )
    if model.attention == "explicit":
        found.append(Replacement("explicit attention", "FlexAttention, one fused kernel"))
    if model.dropout:
        found.append(Replacement(f"dropout {model.dropout}", "none"))
    module = MODULE.format(
        **{key: repr(getattr(model, key)) for key in _SIZES},
        name=repr(model.name),
        rope=_keywords(_rope(model), ", "),
        recompute_import=_IMPORT.format(kind) if kind else "",
        recompute=f"        activation_checkpoint={kind}.Config(),\n" if kind else "",
        modules=_modules(job.chunks) if job.pp > 1 else "",
        parallelism=_lines(_parallelism(plan, job, found)),
        training=_lines(_training(plan, job, found)),
    )
    lines = [*heading(plan, USE, found), *rank_lines(job.ranks)]
    return FrameworkFile("\n".join([*lines, "", module]), tuple(found))


_SIZES = ("hidden", "vocab", "heads", "kv_heads", "intermediate", "layers", "norm_eps")
_IMPORT = "from torchtitan.distributed.activation_checkpoint import {}\n"


def _rope(model: LlamaModel) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "dim": model.head_size,
        "max_seq_len": model.sequence_length,
        "theta": model.rope_theta,
    }
    if (scaling := model.rope_scaling) is not None:
        rope |= {
            "scaling": "llama",
            "scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return rope


def _training(plan: Plan, job: UniformJob, found: list[Replacement]) -> dict[str, Any]:
    training: dict[str, Any] = {
        # with a pipeline this is what a replica has in a step, which it cuts into micro-batches
        "local_batch_size": job.micro_batch * (job.micro_batches if job.pp > 1 else 1),
        "global_batch_size": job.global_batch,
        "seq_len": plan.model.sequence_length,
    }
    if plan.model.dtype == "float32":
        training["mixed_precision_param"] = "float32"
    elif plan.model.dtype != "bfloat16":
        found.append(Replacement(f"dtype {plan.model.dtype}", "bfloat16"))
    if job.pp > 1:
        training["disable_cuda_graphs"] = True
    if plan.optimizer == "muon":
        found.append(Replacement("optimizer muon", "AdamW"))
    return training


def _parallelism(plan: Plan, job: UniformJob, found: list[Replacement]) -> dict[str, Any]:
    sharded = plan.zero_stage > 0
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else job.dp,
        "data_parallel_shard_degree": job.dp if sharded else 1,
        "tensor_parallel_degree": job.tp,
        "enable_sequence_parallel": job.sequence_parallel,
    }
    if sharded and job.dp > 1:
        settings["fsdp_reshard_after_forward"] = "never"
        found.append(
            Replacement(
                f"ZeRO stage {plan.zero_stage}",
                "FSDP that keeps gathered weights until the backward: weights are sharded as well",
            )
        )
    if job.pp > 1:
        settings |= {
            "pipeline_parallel_degree": job.pp,
            "pipeline_parallel_schedule": _schedule(job),
            "pipeline_parallel_microbatch_size": job.micro_batch,
        }
    return settings


def _schedule(job: UniformJob) -> str:
    if job.schedule == "gpipe" and len(job.chunks) > job.pp:
        return "LoopedBFS"  # GPipe over several ministages
    return SCHEDULES[job.schedule]


def _modules(chunks: tuple[tuple[int, int], ...]) -> str:
    parts = [[f"layers.{layer}" for layer in range(*chunk)] for chunk in chunks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    indent = " " * 12
    rows = "".join(f"{indent}    {part!r},\n" for part in parts)
    return f"{indent}module_fqns_per_model_part=[\n{rows}{indent}],\n"


def _keywords(values: dict[str, Any], separator: str) -> str:
    return separator.join(f"{key}={value!r}" for key, value in values.items())


def _lines(values: dict[str, Any]) -> str:
    indent = " " * 12
    return indent + _keywords(values, f",\n{indent}") + ","
