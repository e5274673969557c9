"""Many runs from one file: what is missing of them is run, then reported.

python pipelines/study.py studies/qat.yaml --root mine --jobs 2
"""

import argparse
import sys
from pathlib import Path

from quarl_tf.cli import main

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("study", help="the study's file")
parser.add_argument("--root", default=".", help="folder of runs/, tflite_models/ and reports/")
args, run_options = parser.parse_known_args()  # Others are those of `quarl study run`.
if not Path(args.study).is_file():
    parser.error(f"name the file of a study before the options; received: {args.study}")
where = [args.study, "--root", args.root]
code = main(["study", "run", *where, *run_options])
# A run that failed leaves the others, and the report names what is missing.
sys.exit(code if code > 1 else main(["study", "report", *where]) or code)
