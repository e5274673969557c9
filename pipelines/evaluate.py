"""Stage 3: flatbuffers in, `<scheme>.eval.json` out, with every episode's seed and return.

python pipelines/evaluate.py mine/tflite_models/CartPole-v1/ppo/s0/int8.tflite
"""

import argparse
import sys
from pathlib import Path

from quarl_tf import evaluate
from quarl_tf.foundation.errors import QuarlError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("artifacts", nargs="+", type=Path)
parser.add_argument("--episodes", type=int, default=100)
args = parser.parse_args()

try:
    for artifact in args.artifacts:
        returns = evaluate(artifact, args.episodes).returns
        print(f"{artifact}: mean return {sum(returns) / len(returns):.2f}")
except QuarlError as error:
    sys.exit(str(error))
