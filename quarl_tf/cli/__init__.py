"""The command `quarl`."""

from quarl_tf.cli.verbs import main

__all__ = ["main"]
