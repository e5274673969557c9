"""Pipeline stage: the same as `quarl evaluate`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
