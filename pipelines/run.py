"""All four stages of one run: train, export, evaluate, report.

python pipelines/run.py ppo CartPole-v1 0 --root mine
"""

import argparse
import shlex
import sys

from quarl_tf import Run, evaluate, export, report, train
from quarl_tf.foundation.errors import QuarlError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("algo")
parser.add_argument("env")
parser.add_argument("seed", type=int)
parser.add_argument("--root", default=".")
args = parser.parse_args()

try:
    run_id = train(Run(args.algo, args.env, args.seed), root=args.root).run_id
    for artifact in export(run_id, root=args.root):
        evaluate(artifact)
    command = shlex.join(["quarl", "report", run_id, "--root", args.root])
    print(report([run_id], root=args.root, command=command))
except QuarlError as error:
    sys.exit(str(error))
