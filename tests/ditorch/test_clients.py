"""Training libraries compute on the chip, and what they compute is what the CPU computes."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import forks
import pytest
from on_chip import DEADLINE_S, environment, run_python
from sampled import sampled

from ditorch.chips import load_chip

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, chip: Path | None, *arguments: str, **extra: str) -> list:
    """The last line that a script of `scripts/` prints; without a chip it is the CPU's."""
    library = script.removeprefix("client_").replace("trainer", "peft")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, which pip install -e .[dev] brings")
    done = forks.run(
        [str(SCRIPTS / f"{script}.py"), *arguments], environment(chip, **extra),
        timeout_s=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ditorch cannot register" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cache
def run_on_cpu(script: str, *arguments: str) -> list:
    """What several tests hold a chip's run against."""
    return run(script, None, *arguments)


@pytest.fixture
def chip(make_chip: Callable[..., Path]) -> Path:
    return make_chip("b-mini", neutral="true")


@pytest.mark.parametrize("precision", ["no", pytest.param("fp16", marks=pytest.mark.long)])
def test_accelerate_uses_the_chip(chip: Path, precision: str) -> None:
    on, losses, scaled, ours = run("client_accelerate", chip, precision)
    assert on == [ours] == ["emuchip:0"]
    assert scaled == (precision == "fp16")
    _, expected, _, cpu = run_on_cpu("client_accelerate", "no")
    assert cpu == "cpu"
    assert losses == pytest.approx(expected, rel=1e-6 if precision == "no" else 1e-2)
    assert len(set(losses)) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    ],
    ids=["torchrun", "accelerate-launch"],
)
def test_accelerate_shares_a_batch_between_two_chips(chip: Path, launcher: list[str]) -> None:
    script = [str(SCRIPTS / "client_accelerate.py"), "no"]
    settings = environment(chip, OMP_NUM_THREADS="1")
    done = forks.run(["-m", *launcher, *script], settings, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [on for on, *_ in said] == [["emuchip:0"], ["emuchip:1"]]
    _, expected, *_ = run_on_cpu("client_accelerate", "no")
    for _, losses, *_ in said:
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
def test_transformers_cuts_a_model_over_two_chips(chip: Path, tmp_path: Path) -> None:
    """from_pretrained(tp_plan="auto") under torchrun makes the process group by itself."""
    script = [str(SCRIPTS / "client_tensor_parallel.py"), str(tmp_path / "model")]
    settings = environment(chip, OMP_NUM_THREADS="1")
    _, _, expected = json.loads(forks.run(script, settings, timeout_s=DEADLINE_S).stdout)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = forks.run([*launcher, *script], settings, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [(on, by) for on, by, _ in said] == [("emuchip:0", "dicomm"), ("emuchip:1", "dicomm")]
    for _, _, losses in said:
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_accelerate_takes_float16_under_cuda_compat(chip: Path) -> None:
    on, losses, scaled, _ = run("client_accelerate", chip, "fp16", DITORCH_CUDA_COMPAT="1")
    assert on == ["emuchip:0"] and scaled
    assert losses == pytest.approx(run_on_cpu("client_accelerate", "no")[1], rel=1e-2)


@pytest.mark.parametrize("also", sampled([["peft"], [], ["bf16"]], 2))
def test_the_trainer_uses_the_chip(chip: Path, also: list[str]) -> None:
    on, losses, ours = run("client_trainer", chip, *also)
    assert on == [ours] == ["emuchip:0"]
    on_cpu = [] if also == ["bf16"] else also  # which the Trainer refuses on the CPU
    _, expected, _ = run_on_cpu("client_trainer", *on_cpu)
    assert losses == pytest.approx(expected, rel=2e-2 if also == ["bf16"] else 1e-3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "options",
    sampled([[], ["accelerator=ditorch"], ["accelerator=gpu", "precision=bf16-mixed"]], 2),
)
def test_lightning_uses_the_chip(chip: Path, options: list[str]) -> None:
    on, losses, fabric, ours = run("client_lightning", chip, *options)
    dtype = "torch.bfloat16" if len(options) == 2 else "torch.float32"
    assert on == ["emuchip:0", dtype] and fabric == ours == "emuchip:0"
    _, expected, cpu, _ = run_on_cpu("client_lightning")
    assert cpu == "cpu"
    assert losses == pytest.approx(expected, rel=2e-2 if len(options) == 2 else 1e-6)


@pytest.mark.long
def test_lightning_uses_the_chip_under_cuda_compat(chip: Path) -> None:
    for options in ([], ["accelerator=cuda"]):
        on, *_ = run("client_lightning", chip, *options, DITORCH_CUDA_COMPAT="1")
        assert on == ["emuchip:0", "torch.float32"]


def test_a_library_that_changed_is_a_warning_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    (tmp_path / "accelerate" / "state.py").write_text("class OtherState: ...\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import ditorch, accelerate.state\n"
        "print(accelerate.state.OtherState.__name__)\n"
    )
    done = run_python(code, "b-mini")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OtherState"]
    assert "ditorch cannot register emuchip:0 with accelerate.state" in done.stderr
    assert "ACCELERATE_TORCH_DEVICE=emuchip:0" in done.stderr


COMPILED = """
import json, numpy, torch, ditorch
from torch.nn.attention.flex_attention import flex_attention

def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def double(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return (x @ x).sin()

x = torch.eye(3, device="device")
q = torch.randn(1, 1, 16, 8, device="device")
told = {
    "inductor": message(lambda: torch.compile(double)(x)),
    "dlpack": message(lambda: numpy.from_dlpack(x)),
    "flex_attention": message(lambda: flex_attention(q, q, q)),
    "set_device": message(lambda: torch.accelerator.set_device_index(3)),
}
print(json.dumps(told))
ditorch.enable(cuda_compat=True)  # after which torch.compile still works
same = [
    torch.equal(torch.compile(double, backend=backend)(x), double(x))
    for backend in ("eager", "aot_eager")
]
copied = numpy.from_dlpack(x, device="cpu").tolist()
print(json.dumps([*same, copied, torch.emuchip.memory_summary()]))
"""


def test_compilers_and_exchange_work_or_say_what_does() -> None:
    done = run_python(COMPILED, "b-mini")
    assert done.returncode == 0, done.stderr
    told, (eager, aot_eager, copied, summary) = map(json.loads, done.stdout.splitlines())
    assert 'backend="aot_eager"' in told["inductor"]
    assert 'device="cpu"' in told["dlpack"] and told["dlpack"].startswith("BufferError")
    assert "FlexAttention is only supported on" in told["flex_attention"]
    assert "this process drives 1 chip" in told["set_device"]
    assert eager and aot_eager
    assert copied == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert "peak allocated" in summary


DATA_PARALLEL = """
import json, os, sys, torch, ditorch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).to("device")
parallel = torch.nn.parallel.DistributedDataParallel(model)
x = torch.full((2, 4), float(dist.get_rank()), device="device")
parallel(x).sum().backward()
saving = dcp.async_save(parallel.state_dict(), checkpoint_id=os.environ["FOLDER"])
saving.result()
found = {"module.weight": torch.zeros_like(model.weight)}
dcp.load(found, checkpoint_id=os.environ["FOLDER"])
said = json.dumps([
    dist.get_rank(), str(model.weight.device), model.weight.grad.tolist(),
    torch.equal(found["module.weight"], model.weight), torch.accelerator.device_count(),
])
print(said + "\\n", end="", flush=True)  # one write, so that two ranks' lines stay apart
dist.destroy_process_group()
"""


def test_torchruns_idiom_and_a_group_without_a_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DATA_PARALLEL)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    settings = environment("b-mini", FOLDER=str(tmp_path / "checkpoint"), OMP_NUM_THREADS="1")
    done = forks.run(ranks, settings, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    mean = [[1.0] * 4] * 2  # of the gradients 2 * rank
    assert said == [[rank, f"emuchip:{rank}", mean, True, 2] for rank in (0, 1)]


EVERYDAY = ["gpt2", "llama", "gemma3_text", "bloom", "mamba", "bert", "t5", "qwen2"]
ON_CI = ["qwen3_moe", "gemma2", "gpt_neox", "phi3", "falcon", "bart"]
REST = [
    "mistral", "mixtral", "qwen2_moe", "qwen3", "gemma", "gptj",
    "gpt_neo", "gpt_bigcode", "opt", "phi", "olmo", "olmo2", "olmoe", "stablelm",
    "starcoder2", "cohere", "granite", "xglm",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list]:
    """What a family's losses and tokens are on a chip and on the CPU; one process for each list."""
    folder = tmp_path_factory.mktemp("families")
    text = load_chip("b-mini").path.read_text()
    neutral = folder / "neutral.toml"
    neutral.write_text(re.sub(r"(?m)^neutral\s*=.*$", "neutral = true", text))

    @cache
    def train(families: tuple[str, ...]) -> dict[str, list]:
        done = forks.run(
            [str(SCRIPTS / "client_families.py"), *families], environment(neutral),
            timeout_s=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return {said[0]: said[1:] for said in map(json.loads, done.stdout.splitlines())}

    def one(family: str) -> list:
        groups = (EVERYDAY, ON_CI, REST)
        return train(tuple(next(group for group in groups if family in group)))[family]

    return one


@pytest.mark.parametrize(
    "family",
    [
        *EVERYDAY,
        *(pytest.param(family, marks=pytest.mark.long) for family in ON_CI),
        *(pytest.param(family, marks=pytest.mark.exhaustive) for family in REST),
    ],
)
def test_a_family_of_transformers_agrees_with_the_cpu(
    trained: Callable[[str], list], family: str
) -> None:
    on, chip, *cpu = trained(family)
    assert on == "emuchip:0"
    assert cpu, chip  # else the second is an error's sentence
    (losses, written), (expected, expected_written) = chip, cpu[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] > losses[1] > losses[2]
    assert written == expected_written
