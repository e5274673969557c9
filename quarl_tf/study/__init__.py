"""A study: many experiments from one file, and what of them exists.

An experiment is one run in one scheme. Which ones a study has follows from its file, and how far
each is from the files of the workspace alone, so a study that was killed goes on where it was.
"""

from quarl_tf.store.state import State
from quarl_tf.study.file import Cell, Study, read
from quarl_tf.study.status import Status, plan

__all__ = ["Cell", "State", "Status", "Study", "plan", "read"]
