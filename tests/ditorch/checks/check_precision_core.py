"""What every precision tool sees, and where it says that was. Run by test_precision_core.py."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
import torch.distributed as dist
from torch import nn, relu
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import ditorch
from ditorch.precision import place, settings
from ditorch.precision.call import Call
from ditorch.precision.place import Place
from ditorch.precision.select import Select, Selection
from ditorch.precision.tensors import read_tensors, written_names
from ditorch.precision.tool import Proceed, Tool

HERE = Path(__file__).name


class Record(Tool):
    """Keeps what it sees."""

    rank_in_line = 90

    def __init__(self, **selection: Unpack[Selection]) -> None:
        super().__init__(**selection)
        self.calls: list[Call] = []
        self.threads: set[int] = set()

    def around(self, call: Call, proceed: Proceed) -> Any:
        self.calls.append(call)
        self.threads.add(threading.get_native_id())
        return proceed(call)

    def places(self, operator: str) -> list[Place]:
        return [call.place for call in self.calls if call.operator.startswith(f"aten.{operator}.")]

    def names(self) -> list[str]:
        return [call.operator.split(".")[1] for call in self.calls]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(self.linear(x))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def model(recompute: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(recompute).to(ditorch.device)


def batch() -> torch.Tensor:
    return torch.ones(2, 4, device=ditorch.device)


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_backward_kernels_and_functions_imported_by_name_are_seen() -> None:
    net, x = model(), batch()
    with Record() as seen:
        net(x).sum().backward()
    assert [each.phase for each in seen.places("relu")] == ["forward"] * 2
    assert [each.phase for each in seen.places("threshold_backward")] == ["backward"] * 2
    assert [each.phase for each in seen.places("mm")].count("backward") == 3
    assert len(seen.threads) == 2  # this one and autograd's for the device


def test_a_backward_operator_is_placed_at_its_forward_call() -> None:
    net, x = model(), batch()
    with Record() as seen:
        net(x).sum().backward()
    forward, backward = seen.places("relu"), seen.places("threshold_backward")
    assert [each.module for each in forward] == ["blocks.0", "blocks.1"]
    assert [each.module for each in backward] == ["blocks.1", "blocks.0"]
    written_at = Block.forward.__code__.co_firstlineno + 1
    for each in forward + backward:
        assert each.source.endswith(f"{HERE}:{written_at} in Block.forward")
        assert each.function == "torch.relu"
    assert {each.module for each in seen.places("mm")} == {"blocks.0.linear", "blocks.1.linear"}
    assert {each.function for each in seen.places("mm")} == {"torch.nn.functional.linear"}


def test_custom_autograd_functions_are_seen() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.pow(3)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0].square() * 3

    x = batch().requires_grad_()
    with Record() as seen:
        Cube.apply(x).sum().backward()
    forward, backward = seen.places("pow")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert "Cube.forward" in forward.source and "Cube.forward" in backward.source


def test_recomputation_has_its_own_phase_and_full_module_names() -> None:
    net, x = model(recompute=True), batch()
    with Record() as seen:
        net(x).sum().backward()
    recomputed = [each for each in seen.places("mm") if each.phase == "recompute"]
    assert [each.module for each in recomputed] == ["blocks.1.linear", "blocks.0.linear"]
    with Record() as seen:
        x.requires_grad_()
        checkpoint(lambda x: x.sin().exp().tanh(), x, use_reentrant=False).sum().backward()
    phases = [each.phase for each in seen.places("sin")]
    assert phases == ["forward", "recompute"]  # outside every module


def test_steps_phases_and_indices() -> None:
    net, x = model(), batch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    with Record(operators="mm, add_") as seen:
        for _ in range(2):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        place.next_step()
        net(x)
    by_step = [[each.key for each in seen.places("mm") if each.step == s] for s in range(4)]
    assert [len(keys) for keys in by_step] == [5, 5, 0, 2]
    assert [key[2:] for key in by_step[0]] == [key[2:] for key in by_step[1]]
    assert len(set(by_step[0])) == 5
    assert {(each.step, each.phase) for each in seen.places("add_")} == {
        (0, "optimizer"),
        (1, "optimizer"),
    }


def test_a_step_that_failed_is_over_for_the_next_tool() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of luck")

    net, x = model(), batch()
    optimizer = Failing(net.parameters())
    with Record(), pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()
    with Record() as seen:
        net(x)
    assert {each.phase for each in seen.places("mm")} == {"forward"}


def test_rank_is_the_environments_or_the_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with Record() as seen:
        batch()
    assert {call.place.rank for call in seen.calls} == {3}


def test_the_source_is_the_users_line() -> None:
    x = batch()
    with Record() as seen:
        torch.nn.functional.softmax(x, -1)
        here = line() - 1
    (softmax,) = seen.places("_softmax")
    assert softmax.source.endswith(f"{HERE}:{here} in test_the_source_is_the_users_line")
    assert str(softmax).startswith("aten._softmax.default #0 (rank 0, step 0, forward of")


def test_inference_mode_shows_the_operators_of_training() -> None:
    linear, x = nn.Linear(4, 4).to(ditorch.device), batch()
    with Record() as trained:
        linear(x).reshape(4, 2)
    with torch.inference_mode(), Record() as inferred:
        linear(x).reshape(4, 2)
    assert inferred.names() == trained.names()
    assert "addmm" in trained.names()


def test_tensor_subclasses_are_seen_as_the_plain_tensors_they_compute_with() -> None:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(4, 4), DeviceMesh("cpu", [0]))
        with Record(operators="mm") as seen:
            x @ x
    finally:
        dist.destroy_process_group()
    (call,) = seen.calls
    assert {type(each) for each in call.args} == {torch.Tensor}


def test_what_a_tool_calls_is_its_own() -> None:
    """Neither another tool nor the program's own modes see or change what a tool computes."""

    class Busy(Record):
        rank_in_line = 10

        def around(self, call: Call, proceed: Proceed) -> Any:
            made.append((torch.zeros(2) + 1).device.type)
            return proceed(call)

    made: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Record() as seen, Busy(), torch.device("meta"):
        x.relu().backward(x.detach())
    assert set(seen.names()) == {"relu", "threshold_backward", "detach"}
    assert set(made) == {"cpu"}


def test_tools_stand_in_line_by_rank_whatever_order_they_are_opened_in() -> None:
    order: list[str] = []

    def tool(name: str, rank: int) -> Tool:
        class Named(Record):
            rank_in_line = rank

            def around(self, call: Call, proceed: Proceed) -> Any:
                order.append(f"{name} in")
                result = proceed(call)
                order.append(f"{name} out")
                return result

        return Named(operators="relu")

    x = batch()
    with tool("inner", 60), tool("outer", 0), tool("middle", 30):
        x.relu()
    assert order == [
        "outer in", "middle in", "inner in", "inner out", "middle out", "outer out"
    ]  # fmt: skip


def test_selections() -> None:
    net, x = model(), batch()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        Record(operators="mm") as by_operator,
        Record(operators=["aten.relu", "*threshold*"]) as by_pattern,
        Record(modules="blocks.1*") as by_module,
        Record(ranks=1) as by_rank,
        Record(steps="1:", operators="mm") as by_step,
        Record(operators="mm", modules="blocks.0.*", steps=0) as by_all,
    ):
        for _ in range(2):
            net(x).sum().backward()
            optimizer.step()
    assert set(by_operator.names()) == {"mm"}
    assert set(by_pattern.names()) == {"relu", "threshold_backward"}
    assert {call.place.module for call in by_module.calls} == {"blocks.1", "blocks.1.linear"}
    assert by_rank.calls == []
    assert {call.place.step for call in by_step.calls} == {1}
    assert {(c.place.module, c.place.step) for c in by_all.calls} == {("blocks.0.linear", 0)}


@pytest.mark.parametrize("steps", ["ten", "3:1", "-1", "1:2:3"])
def test_malformed_steps_are_refused(steps: str) -> None:
    with pytest.raises(ValueError, match=f"steps is '{steps}', expected steps and ranges"):
        Select.of(steps=steps)
    with pytest.raises(ValueError, match="ranks is -1, expected ranks from 0"):
        Select.of(ranks=-1)


def test_a_thread_with_its_own_tool_is_seen_and_others_are_not() -> None:
    x = batch()
    with Record() as mine:
        bare = threading.Thread(target=lambda: x.cos())
        bare.start()
        bare.join()
        seen_in_thread: list[str] = []

        def work() -> None:
            with Record() as seen:
                x.sin()
            seen_in_thread.extend(seen.names())

        watched = threading.Thread(target=work)
        watched.start()
        watched.join()
        x.tan()
    assert seen_in_thread == ["sin"]
    assert mine.names() == ["sin", "tan"]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert _len_torch_function_stack() == 0
    assert not modules._global_forward_pre_hooks and not modules._global_forward_hooks
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_a_closed_tool_leaves_nothing_behind() -> None:
    net, x = model(), batch()
    with nothing_left_behind(), Record(), Record():
        net(x).sum().backward()
    refused = pytest.raises(RuntimeError, match="cannot be multiplied")
    with nothing_left_behind(), refused, Record():
        net(torch.ones(2, 5, device=ditorch.device))
    first, second = Record(), Record()
    with nothing_left_behind():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # not the last one opened
        x.relu()
        second.__exit__(None, None, None)
    assert (first.names(), second.names()) == ([], ["relu"])


def test_written_and_read_arguments() -> None:
    def only(names: list[str]) -> Call:
        (call,) = (call for call in seen.calls if call.operator.split(".")[1] in names)
        return call

    x, y, norm = batch(), batch(), nn.BatchNorm1d(4).to(ditorch.device)
    with Record() as seen:
        x.mul_(y)
        torch.add(x, y, out=torch.empty(0, device=ditorch.device))
        y.copy_(x)
        norm(x)
    assert written_names(only(["mul_"])) == {"self"}
    assert [name for name, _ in read_tensors(only(["mul_"]))] == ["self", "other"]
    assert written_names(only(["add"])) == {"out"}
    assert [name for name, _ in read_tensors(only(["add"]))] == ["self", "other"]
    assert [name for name, _ in read_tensors(only(["copy_"]))] == ["src"]
    assert written_names(only(["native_batch_norm"])) >= {"running_mean", "running_var"}


# --- settings ---------------------------------------------------------------------------------


def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, env: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DITORCH_CONFIG", raising=False)
    monkeypatch.setenv("DITORCH_PRECISION", env)
    if text is not None:
        Path("ditorch.toml").write_text(text)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("compere", "DITORCH_PRECISION: compere: unknown tool, expected one of compare, "),
        ("overflow = 3", "DITORCH_PRECISION: overflow: expected a table of arguments, got 3"),
        ("overflow = {", "DITORCH_PRECISION: not TOML: "),
        ("overflow = {oops = 1}", "DITORCH_PRECISION: overflow.oops: unknown key"),
        ("cast = {operators = 'mm', dtype = 'int8'}", "DITORCH_PRECISION: cast.dtype: expected"),
        ("fallback", "DITORCH_PRECISION: fallback: operators is missing"),
        ("overflow = {steps = '5:1'}", "DITORCH_PRECISION: overflow: steps is '5:1'"),
    ],
)
def test_environments_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, env: str, sentence: str
) -> None:
    configure(monkeypatch, tmp_path, None, env)
    with nothing_left_behind(), pytest.raises(ValueError) as refused:
        settings.open_configured_tools.__wrapped__()
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[precison.overflow]\n", "ditorch.toml: precison: unknown table"),
        ("precision = 3\n", "ditorch.toml: precision: expected a table of tools"),
        ("[precision.overflow]\nranks = 'all'\n", "ditorch.toml: overflow.ranks"),
    ],
)
def test_files_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, sentence: str
) -> None:
    configure(monkeypatch, tmp_path, text, "")
    with pytest.raises(ValueError) as refused:
        settings.open_configured_tools.__wrapped__()
    assert str(refused.value).startswith(sentence)
