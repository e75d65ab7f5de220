"""Plans Llama-3-8B on GPUs and NPUs at once, and draws the step that is predicted.

python examples/plan_cluster.py    writes plan.json and step.png to runs/plan-cluster
"""

from pathlib import Path

import heteropp
from heteropp.simulator.picture import draw_simulation

CLUSTER = """
name = "two-vendors"

[[nodes]]
chip = "a100"
chips = 8

[[nodes]]
chip = "ascend-910b"
chips = 8
"""

folder = Path("runs/plan-cluster")
folder.mkdir(parents=True, exist_ok=True)
cluster = folder / "cluster.toml"
cluster.write_text(CLUSTER)

plan = heteropp.plan("llama-3-8b", cluster, global_batch=128, planner="heteroauto")
step = heteropp.simulate(plan, cluster)
for number, stage in enumerate(plan.pipelines[0].stages):
    tp, dp = len(stage.replicas[0].ranks), len(stage.replicas)
    print(f"stage {number}: layers {stage.layers[0]} to {stage.layers[1] - 1}, tp {tp}, dp {dp}")
print(f"predicted: {step.step_s:.2f} s a step, {step.tokens_per_chip_per_s:.0f} tokens/chip/s")

heteropp.write_plan(plan, folder / "plan.json")
draw_simulation(folder / "step.png", step)
print(f"written to {folder}: plan.json, step.png")
