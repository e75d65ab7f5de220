"""Random numbers: one seed, the same numbers on every chip and on the CPU."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ditorch


def test_one_seed_gives_the_cpus_numbers() -> None:
    torch.manual_seed(11)
    on_chip = [torch.randn(300, device="device"), torch.randint(99, (7,), device="device")]
    torch.manual_seed(11)
    on_cpu = [torch.randn(300), torch.randint(99, (7,))]
    for ours, theirs in zip(on_chip, on_cpu, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_the_cpus_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(9, device="device")
    torch.nn.functional.dropout(torch.ones(9, device="device"), 0.5)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_follows_the_seed() -> None:
    layer = nn.Dropout(0.5)
    x = torch.ones(64, device="device", requires_grad=True)
    torch.manual_seed(2)
    first = layer(x)
    torch.manual_seed(2)
    assert torch.equal(layer(x), first)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


def philox(key: int, counter: int) -> list[int]:
    """Four words of Philox4x32-10 (Salmon et al., SC 2011)."""
    low = 0xFFFFFFFF
    words, keys = [counter & low, counter >> 32, 0, 0], [key & low, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            second >> 32 ^ words[1] ^ keys[0], second & low,
            first >> 32 ^ words[3] ^ keys[1], first & low,
        ]  # fmt: skip
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return words


def test_the_chips_own_dropout_is_philox() -> None:
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # the authors' own
    ditorch.reset_fallback_counts()
    torch.manual_seed(3)
    x = torch.ones(301, 7, device="device").t()  # its places in memory are no elements' numbers
    kept = nn.functional.dropout(x, 0.3).cpu() != 0
    if ditorch.fallback_counts():
        assert ditorch.vendor() not in ("emuchip", "opencl"), "it has a kernel"
        pytest.skip("this chip leaves dropout to the host")
    numbers = torch.Generator().manual_seed(3)
    key = torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=numbers).item()
    words = [philox(key % 2**64, n // 4)[n % 4] for n in range(x.numel())]
    expected = torch.tensor([(word >> 8) / 2**24 for word in words]) < torch.tensor(1 - 0.3)
    assert torch.equal(kept, expected.view(7, 301))


def test_states_can_be_kept() -> None:
    state = torch.get_device_module().get_rng_state()
    first = torch.rand(5, device="device")
    torch.get_device_module().set_rng_state(state)
    assert torch.equal(torch.rand(5, device="device"), first)
    with torch.random.fork_rng(devices=[0], device_type="device"):
        torch.rand(5, device="device")
    second = torch.rand(5, device="device")
    torch.get_device_module().set_rng_state(state)
    torch.rand(5, device="device")
    assert torch.equal(torch.rand(5, device="device"), second)


def test_generators_belong_to_a_device() -> None:
    generator = torch.Generator(device="device").manual_seed(3)
    twin = generator.clone_state()
    assert torch.equal(
        torch.rand(3, device="device", generator=generator),
        torch.rand(3, device="device", generator=twin),
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="device", generator=torch.Generator())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_generator_is_copied_and_pickled_where_it_stands(again) -> None:
    generator = torch.Generator(device="device").manual_seed(3)
    torch.rand(3, device="device", generator=generator)
    twin = again(generator)
    assert twin.device == generator.device
    assert torch.equal(
        torch.rand(3, device="device", generator=twin),
        torch.rand(3, device="device", generator=generator),
    )
    with pytest.raises(RuntimeError, match="has no offset"):
        generator.set_offset(100)


def test_checkpointing_recomputes_the_same_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="device", requires_grad=True)
    y = checkpoint(nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
