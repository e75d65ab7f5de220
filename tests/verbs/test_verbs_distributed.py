"""torch.distributed and training over RDMA rails only."""

import torch
from ranks import run_processes
from test_distributed import compare_with_gloo, messages
from training_run import Training, make_plan, tiny_model
from verbs_ranks import TWO_RAILS, nics, packets_sent

VERBS = {"DICOMM_TRANSPORT": "verbs"}


def all_of_it(rank):
    compared = compare_with_gloo(rank)
    messages(rank)
    big = torch.full((1 << 20,), float(rank + 1))
    torch.distributed.all_reduce(big)
    assert (big == 10).all()
    return compared


def test_every_collective_on_four_ranks_and_messages_through_torch(monkeypatch):
    before = packets_sent("rxe0")
    compared = run_processes(4, all_of_it, environment=VERBS | {"DICOMM_NICS": "rxe0"})
    assert min(compared) > 100
    assert packets_sent("rxe0") - before > 4 << 10


def test_a_model_trains_over_verbs_as_over_shared_memory(tmp_path, monkeypatch):
    plan = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))
    losses = {}
    for transport in ("shm", "verbs"):
        folder = tmp_path / transport
        folder.mkdir()
        monkeypatch.setenv("DICOMM_TRANSPORT", transport)
        monkeypatch.setenv("DICOMM_NICS", nics(0, TWO_RAILS))
        before = packets_sent("rxe0") + packets_sent("rxe2")
        losses[transport] = Training(folder, plan, "--steps", "3").finish().losses
        over_rdma = packets_sent("rxe0") + packets_sent("rxe2") - before
        assert (over_rdma > 100) == (transport == "verbs"), over_rdma
    assert losses["verbs"] == losses["shm"]
