"""Pipeline stage: the same as `quarl train`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
