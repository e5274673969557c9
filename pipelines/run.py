"""Pipeline stage: the same as `quarl run`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
