"""Pipeline stage: the same as `quarl export`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
