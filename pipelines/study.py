"""Many runs from one file: what is missing of them is run, then reported.

python pipelines/study.py studies/qat.yaml
"""

import sys

from quarl_tf.cli import main

if len(sys.argv) < 2:
    sys.exit("Name a study's file. Received: none")
study, *options = sys.argv[1:]
for action in ("run", "report"):
    code = main(["study", action, study, *options])
    if code:
        sys.exit(code)
