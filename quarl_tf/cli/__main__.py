"""Run the command as `python -m quarl_tf.cli`."""

import sys

from quarl_tf.cli import main

sys.exit(main())
