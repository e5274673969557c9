"""Many experiments: the same as `quarl study`."""

import sys

from quarl_tf.cli import main

if __name__ == "__main__":
    sys.exit(main(["study", *sys.argv[1:]]))
