"""Pipeline stage: the same as `quarl report`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
