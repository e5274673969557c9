"""Stage 1: a task and a seed in, `runs/<run_id>/` out, with the network and its learning curve.

python pipelines/train.py ppo CartPole-v1 0 --root mine
"""

import argparse
import sys

from quarl_tf import Run, train
from quarl_tf.foundation.errors import QuarlError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("algo")
parser.add_argument("env")
parser.add_argument("seed", type=int)
parser.add_argument("--root", default=".")
args = parser.parse_args()

try:
    record = train(Run(args.algo, args.env, args.seed), root=args.root)
except QuarlError as error:
    sys.exit(str(error))
print(f"{record.run_id}: greedy return {record.selection_return:.1f} on selection seeds")
