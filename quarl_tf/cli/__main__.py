"""Run the command as `python -m quarl_tf.cli`."""

import sys

from quarl_tf.cli.verbs import main

sys.exit(main())
