"""Train a policy, export it, measure what int8 costs, and act: `python examples/api.py`."""

import sys

from quarl_tf import Policy, Run, evaluate, export, report, train

root = sys.argv[1] if len(sys.argv) > 1 else "mine"
run = Run("ppo", "CartPole-v1", seed=0, overrides={"steps": 20_000})

train(run, root=root)
fp32, int8 = export(run.run_id, ["fp32", "int8"], root=root)
returns = [sum(evaluate(path).returns) / 100 for path in (fp32, int8)]
page = report([run.run_id], root=root)
print(f"mean return {returns[0]:.1f} in float32, {returns[1]:.1f} in int8: {page}")

policy = Policy.load(int8)
print("action:", policy.act([0.01, -0.02, 0.03, 0.04]))
