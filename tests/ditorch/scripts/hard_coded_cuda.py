"""A training script written for NVIDIA's GPUs, as people write them."""

import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True
assert torch.cuda.is_available(), "this script needs a GPU"

local_rank = torch.cuda.device_count() - 1
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
assert device == torch.device(f"cuda:{local_rank}")
properties = torch.cuda.get_device_properties(device)
assert properties.name == torch.cuda.get_device_name(device) and properties.total_memory > 0
half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
assert torch.cuda.get_device_capability(0) >= (0, 0)

inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=32, pin_memory=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
scaler = torch.amp.GradScaler("cuda")
losses = []
for _ in range(6):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to("cuda:0", non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=half):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    square = torch.randn(32, 32, device="cuda") ** 2
torch.cuda.current_stream().wait_stream(side)
square.record_stream(torch.cuda.current_stream())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
square @ square
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0

assert 0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()
assert "allocated" in torch.cuda.memory_summary()
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total

state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3, device=torch.device("cuda:0")))
with torch.cuda.device(0), torch.random.fork_rng():
    torch.cuda.manual_seed(1)

file = io.BytesIO()
torch.save(model.state_dict(), file)
for location in ("cuda", "cuda:0", device, lambda storage, _: storage.cuda()):
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location=location, weights_only=False))
print("hard-coded cuda:", square.device.type)
