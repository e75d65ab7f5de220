"""A script that knows torch.accelerator and nothing of ditorch."""

import torch

acc = torch.accelerator
device = acc.current_accelerator() if acc.is_available() else torch.device("cpu")
x = torch.randn(64, 64, device=device)
model = torch.nn.Linear(64, 64).to(device)
model(x).sum().backward()

if acc.is_available():
    assert acc.device_count() == 1 and acc.current_device_index() == 0
    acc.set_device_index(0)
    with acc.device_index(0):
        assert torch.ones(2, device=0).device.type == device.type
    side, main = torch.Stream(device), acc.current_stream()
    side.wait_stream(main)
    with side:
        y = x @ x
    main.wait_stream(side)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    x @ x
    end.record()
    acc.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.allclose(y.cpu(), (x @ x).cpu(), rtol=1e-2, atol=1e-2)

    held = acc.memory_allocated()
    more = torch.empty(1 << 20, device=device)
    assert acc.memory_allocated() >= held + more.nbytes
    assert acc.max_memory_allocated() >= acc.memory_allocated()
    assert acc.memory_reserved() >= more.nbytes
    del more
    assert acc.memory_allocated() == held
    acc.empty_cache()
    acc.empty_host_cache()
    acc.reset_peak_memory_stats()
    assert acc.max_memory_allocated() == acc.memory_allocated()
    free, total = acc.get_memory_info()
    assert 0 < free < total
    assert torch.float32 in acc.get_device_capability()["supported_dtypes"]

    batches = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (batch,) in torch.utils.data.DataLoader(batches, batch_size=4, pin_memory=True):
        assert batch.is_pinned()
        assert batch.to(device, non_blocking=True).sum() > 0
else:
    assert acc.current_accelerator(check_available=True) is None and acc.device_count() == 0
print("accelerator:", x.device.type)
