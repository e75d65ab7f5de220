"""Plans, predicts and trains the quickstart's Llama on emulated chips of four vendors.

python examples/train_plan.py    takes about a minute; heteropp-board runs/train-plan shows the run
"""

import json

import heteropp

STEPS = 4


def main() -> None:
    plan = heteropp.plan("quickstart", "quickstart", global_batch=8, planner="heteroauto")
    predicted = heteropp.simulate(plan, "quickstart", emulated=True)
    print(f"predicted: {predicted.step_s:.2f} s a step on {plan.world_size} chips")

    run = heteropp.train(plan, "quickstart", steps=STEPS, output="runs/train-plan")
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"step {row['step']}: loss {row['loss']:.3f}, {row['step_s']:.2f} s")
    print(f"metrics and traces are in {run}")


if __name__ == "__main__":  # the ranks are processes that import this file again
    main()
