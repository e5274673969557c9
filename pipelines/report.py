"""Stage 4: evaluated runs in, `reports/<name>/` out: tables, figures and what they say.

python pipelines/report.py ppo-CartPole-v1-s0 --root mine
"""

import argparse
import shlex
import sys

from quarl_tf import report
from quarl_tf.foundation.errors import QuarlError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("runs", nargs="+")
parser.add_argument("--name", help="of the report; default: after the runs")
parser.add_argument("--root", default=".")
args = parser.parse_args()

try:
    command = shlex.join(["quarl", "report", *sys.argv[1:]])
    page = report(args.runs, root=args.root, name=args.name, command=command)
except QuarlError as error:
    sys.exit(str(error))
print(page)
