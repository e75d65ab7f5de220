"""Operators write where torch says they write, and views are views."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ditorch


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="device").view(shape)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x.reshape(2, 8),
        lambda x: x[1:3, ::2],
        lambda x: x.expand(3, 4, 4),
        lambda x: x.unfold(0, 2, 1),
        lambda x: x.diagonal(),
        lambda x: x.unbind(1)[2],
        lambda x: x.split(3)[1],
        lambda x: x.chunk(2, 1)[1],
        lambda x: x.movedim(0, 1).unsqueeze(0).squeeze(0),
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.view(4, 2, 2)),
        lambda x: torch.as_strided(x, (2, 2), (5, 1), 1),
        lambda x: x.detach(),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 2, 2)).conj().conj()),
    ],
)
def test_views_are_true_views(view) -> None:
    x, expected = ramp(4, 4), ramp(4, 4).cpu()
    seen, seen_on_cpu = view(x), view(expected)
    assert seen.data_ptr() - seen.storage_offset() * seen.element_size() == x.data_ptr()
    assert seen.device == ditorch.device
    assert (seen.shape, seen.stride()) == (seen_on_cpu.shape, seen_on_cpu.stride())
    if seen.dim() < 3 or seen.is_complex():
        seen.zero_()
        seen_on_cpu.zero_()
        assert torch.equal(x.cpu(), expected)


def test_in_place_operators_return_their_argument() -> None:
    x = ramp(4, 4)
    pointer, version = x.data_ptr(), x._version
    assert (
        x.mul_(2)
        .add_(1)
        .clamp_(max=9)
        .cumsum_(0)
        .index_fill_(0, torch.tensor([1], device="device"), 0.0)
        is x
    )
    assert x.data_ptr() == pointer
    assert x._version > version
    y = ramp(4, 4).cpu()
    y.mul_(2).add_(1).clamp_(max=9).cumsum_(0).index_fill_(0, torch.tensor([1]), 0.0)
    assert torch.equal(x.cpu(), y)


def test_a_write_reaches_every_view() -> None:
    x = ramp(4, 4)
    row, column = x[1], x[:, 2]
    row.fill_(-1)
    torch.exp(column, out=column)
    expected = ramp(4, 4).cpu()
    expected[1] = -1
    expected[:, 2] = expected[:, 2].exp()
    assert torch.equal(x.cpu(), expected)


def test_out_arguments() -> None:
    x = ramp(4, 4)
    right, wrong, strided = (
        torch.empty(4, 4, device="device"),
        torch.empty(0, device="device"),
        ramp(4, 8)[:, ::2],
    )
    for out in (right, wrong, strided):
        assert torch.mul(x, 3, out=out) is out
        assert torch.equal(out.cpu(), x.cpu() * 3)
        assert torch.mm(x, x, out=out) is out
        torch.testing.assert_close(out.cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=0)
    values, indices = (
        torch.empty(0, device="device"),
        torch.empty(0, dtype=torch.long, device="device"),
    )
    torch.sort(-x, dim=1, out=(values, indices))
    assert torch.equal(indices.cpu(), torch.sort(-x.cpu(), dim=1).indices)


def test_overlap_is_refused_as_on_the_cpu() -> None:
    x = torch.zeros(1, device="device").expand(4)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)


def test_indexing() -> None:
    x, expected = ramp(4, 4), ramp(4, 4).cpu()
    index = torch.tensor([0, 2, 0])
    assert torch.equal(x[index].cpu(), expected[index])
    assert torch.equal(x[index.to("device")].cpu(), expected[index])
    assert torch.equal(x[x > 5].cpu(), expected[expected > 5])
    x.index_put_((index.to("device"),), torch.ones(4, device="device"), accumulate=True)
    expected.index_put_((index,), torch.ones(4), accumulate=True)
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(x.nonzero().cpu(), expected.nonzero())
    assert int(x.argmax()) == int(expected.argmax())


def test_copies_convert_and_spread() -> None:
    x = torch.arange(6).view(2, 3)
    assert torch.equal(x.to("device", torch.float16).cpu(), x.half())
    target = torch.zeros(3, 2, dtype=torch.float64, device="device").t()
    target.copy_(x)
    assert torch.equal(target.cpu(), x.double())
    back = torch.zeros(2, 2, 3)
    back.copy_(target)
    assert torch.equal(back, x.float().expand(2, 2, 3))
    for dtype in (torch.float32, torch.float16, torch.int32):
        eighth = x.to("device", dtype).to(torch.float8_e4m3fn)
        assert torch.equal(eighth.to(dtype).cpu(), x.to(dtype))
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(z.conj().to("device").cpu(), z.conj().resolve_conj())
    assert torch.equal(z.to("device").conj().cpu(), z.conj())
    assert torch.equal(z.to("device").conj().imag.cpu(), z.conj().imag)


def test_small_and_odd_tensors() -> None:
    assert torch.ones(0, 3, device="device").sum().item() == 0
    assert torch.ones((), device="device").add(1).item() == 2
    assert (torch.ones(0, 3, device="device") @ torch.ones(3, 2, device="device")).shape == (0, 2)
    assert (
        torch.ones(2, 0, device="device").matmul(torch.ones(0, 2, device="device")).sum().item()
        == 0
    )
    assert torch.tensor([True, False], device="device").logical_not().tolist() == [False, True]
    assert torch.tensor(3, device="device") == 3
    x = torch.ones(3, device="device")
    x.resize_(5)
    x[3:] = 7
    assert x.tolist() == [1, 1, 1, 7, 7]
    y = torch.empty(0, device="device").set_(x)
    assert y.data_ptr() == x.data_ptr()


def test_devices_are_not_mixed() -> None:
    x = torch.ones(3, device="device")
    assert (x + torch.tensor(2.0)).device == ditorch.device
    with pytest.raises(RuntimeError, match=rf"same device.*{ditorch.device} and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x @ torch.ones(3)
    for mix in (torch.cat, torch.stack, torch._foreach_norm):
        with pytest.raises(RuntimeError, match="same device"):
            mix([x, torch.ones(3)])
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add([x], [torch.ones(3)])
    assert torch._foreach_add([x], [torch.tensor(2.0)])[0].tolist() == [3, 3, 3]
    torch._foreach_copy_([x], [torch.full((3,), 7.0)])
    assert x[torch.tensor([1, 2])].tolist() == [7, 7]


def test_sparse_quantized_and_nested_tensors_are_refused_in_one_sentence() -> None:
    x = torch.eye(3, device="device")
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(parts, requires_grad=True)
    for make in (
        lambda: x.to_sparse(),
        lambda: x.to_sparse_csr(),
        lambda: torch.eye(3).to_sparse().to("device"),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="device"),
        lambda: torch.nested.nested_tensor(parts, device="device", requires_grad=True) + 1,
        lambda: torch.nested.as_nested_tensor([x, x[1:].clone().requires_grad_()]),
        lambda: nested.to("device"),
    ):
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=rf"{ditorch.device.type}.*dense tensors only"
        ):
            make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_narrow_grid_still_says_where_to_sample(dtype: torch.dtype, dimensions: int) -> None:
    """The CPU's kernel works out positions in the grid's dtype: its pictures move by pixels."""
    torch.manual_seed(0)
    picture = torch.randn(2, 3, *[16] * dimensions, dtype=dtype)
    grid = (torch.rand(2, *[5] * dimensions, dimensions) * 2 - 1).to(dtype)
    for mode in ("bilinear", "nearest", "bicubic")[: 5 - dimensions]:
        sampled, truth = (
            F.grid_sample(x.requires_grad_(), at, mode=mode, align_corners=False)
            for x, at in (
                (picture.to("device"), grid.to("device")), (picture.double(), grid.double())
            )
        )  # fmt: skip
        torch.testing.assert_close(sampled.cpu(), truth.to(dtype))


def test_jagged_nested_tensors_are_dense_inside() -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    ragged = torch.nested.nested_tensor(
        parts, device="device", layout=torch.jagged, requires_grad=True
    )
    F.linear(ragged, torch.full((5, 3), 2.0, device="device")).values().sum().backward()
    assert ragged.grad is not None
    assert ragged.grad.values().cpu().tolist() == [[10.0] * 3] * 6


def test_what_the_chip_computes_and_what_the_host_does() -> None:
    x = torch.randn(4, 4, device="device")
    ditorch.reset_fallback_counts()
    torch.softmax(x @ x, -1).sum(0)
    F.layer_norm(x, (4,))
    F.rms_norm(x, (4,))
    torch.log_softmax(x, -1).mean()
    torch.addmm(x, x, x)
    torch.bmm(x[None], x[None])
    x.t()[1:].unsqueeze(0)
    x.add_(1).add_(1)
    assert ditorch.fallback_counts() == {}
    torch.cumprod(x, 0)
    x.erfinv_().erfinv_()
    assert ditorch.fallback_counts() == {"cumprod": 1, "erfinv": 2}


@pytest.mark.parametrize(
    "name",
    ["bool", "uint8", "int16", "uint32", "int64", "float8_e4m3fn", "bfloat16", "half", "float64"],
)
def test_one_element_is_read_as_it_is(name: str) -> None:
    value = torch.tensor([0, 3, 1]).to(getattr(torch, name))
    on_chip = value.to("device")
    for place in range(3):
        assert on_chip[place].item() == value[place].item()
        assert type(on_chip[place].item()) is type(value[place].item())


def test_a_conjugate_or_negated_element_is_read_as_it_is() -> None:
    value = torch.tensor([2 - 3j, 1 + 4j])
    on_chip = value.to("device")
    assert on_chip.conj()[1].item() == 1 - 4j  # conj() and its imag are computed when they are read
    assert on_chip.conj().imag[1].item() == -4


def test_attention_forward_and_backward() -> None:
    torch.manual_seed(0)
    on_cpu = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
    on_chip = [t.detach().to("device").requires_grad_() for t in on_cpu]
    for causal in (False, True):
        F.scaled_dot_product_attention(*on_cpu, is_causal=causal).square().sum().backward()
        F.scaled_dot_product_attention(*on_chip, is_causal=causal).square().sum().backward()
    for ours, theirs in zip(on_chip, on_cpu, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_optimizers(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    on_cpu = nn.Linear(8, 8)
    on_chip = nn.Linear(8, 8, device="device")
    on_chip.load_state_dict(on_cpu.state_dict())
    for model, device in ((on_cpu, "cpu"), (on_chip, "device")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model.weight.grad = torch.ones(8, 8, device=device)
            model.bias.grad = torch.ones(8, device=device)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(on_chip.weight.cpu(), on_cpu.weight, rtol=1e-4, atol=1e-4)


def test_convolutions() -> None:
    torch.manual_seed(0)
    for layer in (nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(3, 4, 3)):
        x = torch.randn(2, 3, 8, 8)
        expected = layer(x).square().sum()
        expected.backward()
        gradient = layer.weight.grad.clone()
        bias_gradient = layer.bias.grad.clone()
        layer.zero_grad()
        layer.to("device")
        layer(x.to("device")).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad.cpu(), gradient, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(layer.bias.grad.cpu(), bias_gradient, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.view(-1).add_(1),
        lambda x, y: torch.add(x, x, out=x),
        lambda x, y: torch.mul(y, x, out=x),
        lambda x, y: x.copy_(y.t()),
        lambda x, y: x.zero_(),
        lambda x, y: x.copy_(torch.zeros(4, 4)),
    ],
)
def test_writing_to_one_of_two_lazy_clones_leaves_the_other_alone(write) -> None:
    x, on_cpu = ramp(4, 4), ramp(4, 4).cpu()
    clone = x._lazy_clone()
    write(x, clone)
    write(on_cpu, on_cpu.clone())
    assert torch.equal(x.cpu(), on_cpu)
    assert torch.equal(clone.cpu(), ramp(4, 4).cpu())


@pytest.fixture
def filling():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filling")
def test_deterministic_algorithms_fill_what_nothing_wrote() -> None:
    most = torch.iinfo(torch.int32).max
    assert torch.empty(3, 3, device="device").isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.complex64, device="device").isnan().all()
    assert torch.empty(9, dtype=torch.int32, device="device").eq(most).all()
    grown = torch.zeros(3, dtype=torch.int32, device="device").resize_(5)
    assert grown.tolist() == [0, 0, 0, most, most]


def test_scripts_index_with_tensors() -> None:
    @torch.jit.script
    def fill(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x[x < 5] = 1.0
        x[:, rows] = x[:, rows] + 1
        return x

    rows = torch.tensor([0, 2])
    assert torch.equal(fill(ramp(4, 4), rows.to("device")).cpu(), fill(ramp(4, 4).cpu(), rows))


def test_an_empty_tensor_has_no_item() -> None:
    with pytest.raises(RuntimeError, match="Empty tensor not supported"):
        torch.ops.aten._local_scalar_dense(torch.empty(0, device="device"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(kind: type[nn.RNNBase], bias: bool) -> None:
    torch.manual_seed(0)
    network = kind(4, 5, num_layers=2, bias=bias, bidirectional=True)
    x = torch.randn(6, 3, 4, requires_grad=True)
    on_chip = x.detach().to("device").requires_grad_()
    expected, _ = network(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    network.to("device")
    result, _ = network(on_chip)
    result.square().sum().backward()
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(on_chip.grad.cpu(), x.grad, rtol=1e-2, atol=1e-2)
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=2e-2, atol=2e-2)


def test_compiled_functions() -> None:
    def scaled_noise(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.ones(4, device="device")

    compiled = torch.compile(scaled_noise, backend="aot_eager")
    assert compiled(torch.ones(4, device="device")).tolist() == [3.0] * 4
