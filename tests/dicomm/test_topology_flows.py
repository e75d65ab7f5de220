"""Fair shares of what transfers share; and the paper's Table 3, which rests on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import server_shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from dicomm.topology import discover, nics_for
from dicomm.topology.flows import Speeds, fair_rates, route

ROOT = Path(__file__).resolve().parents[2]
CAPACITIES = st.lists(st.floats(0.1, 10), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(capacities=CAPACITIES, data=st.data())
def test_shares_are_max_min_fair(capacities, data):
    """The definition: no resource is overfull, and each flow meets a full one where none is faster.

    No flow could then be faster but at the cost of one no faster than it.
    """
    resources = st.sets(st.integers(0, len(capacities) - 1), min_size=1)
    flows = data.draw(st.lists(resources, min_size=1, max_size=6))
    rates = fair_rates([{str(r): capacities[r] for r in flow} for flow in flows])
    used = [sum(rates[i] for i, flow in enumerate(flows) if r in flow)
            for r in range(len(capacities))]  # fmt: skip
    for r, capacity in enumerate(capacities):
        assert used[r] <= capacity * (1 + 1e-9)
    for i, flow in enumerate(flows):
        assert any(
            used[r] == pytest.approx(capacities[r])
            and all(rates[j] <= rates[i] * (1 + 1e-9) for j, its in enumerate(flows) if r in its)
            for r in flow
        )


def test_what_lies_between_a_chip_and_the_wire(tmp_path):
    server_shapes.eight_chips(tmp_path)
    topology = discover(tmp_path)
    chip, speeds = topology.chips[0], Speeds(1.0, 2.0)
    near, far = nics_for(topology, chip)[0], nics_for(topology, topology.chips[-1])[0]
    assert list(route(topology, chip, near, speeds, outward=True)) == [
        "memory of 0000:18:00.0 up",
        "link of 0000:18:00.0 up",
        "link of 0000:19:00.0 down",
        "wire of mlx5_0:1 out",
    ]
    back = route(topology, chip, far, speeds, outward=False)
    assert list(back) == [
        "memory of 0000:18:00.0 down",
        "link of 0000:16:00.0 down",
        "link of 0000:18:00.0 down",
        "link of 0000:b8:00.0 up",
        "link of 0000:bd:00.0 up",
        "NUMA node 1 to 0",
        "wire of mlx5_7:1 in",
    ]
    assert back["NUMA node 1 to 0"] == 2.0
    assert back["wire of mlx5_7:1 in"] == 12.5e9


def test_table_3_within_a_tenth():
    """The emulated clock's figures, so no matter of this machine's speed."""
    done = subprocess.run(
        [str(ROOT / "tools" / "affinity-table"), "--message-mib", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    evidence = json.loads(done.stdout)
    assert evidence["tool"] == "affinity-table"
    *rows, farthest = evidence["rows"]
    published = {row["name"]: row["peer"] for row in rows}
    assert published["A to B, improvement"] == pytest.approx(9.56 / 5.51)
    assert published["B to D, improvement"] == pytest.approx(9.91 / 5.23)
    assert len(rows) == 6
    for row in rows:
        assert 0.9 <= row["ratio"] <= 1.1, row
    assert farthest["ours"] <= farthest["bar"] == 0.1
