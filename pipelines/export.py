"""Stage 2: a trained run in, one `.tflite` a scheme out, each with its sidecar.

python pipelines/export.py ppo-CartPole-v1-s0 fp32 int8 --root mine
"""

import argparse
import sys

from quarl_tf import export
from quarl_tf.foundation.errors import QuarlError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("run")
parser.add_argument("schemes", nargs="*", help="default: all usual ones")
parser.add_argument("--root", default=".")
args = parser.parse_args()

try:
    artifacts = export(args.run, args.schemes or None, root=args.root)
except QuarlError as error:
    sys.exit(str(error))
print(*artifacts, sep="\n")
