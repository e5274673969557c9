"""A study: many experiments from one file, and their progress.

An experiment is one run in one scheme. The file says which ones there are, the files of the
workspace how far each is, so that a killed study resumes where it stopped.
"""

from quarl_tf.store.state import State
from quarl_tf.study.file import Cell, Study, read
from quarl_tf.study.status import Status, plan

__all__ = ["Cell", "State", "Status", "Study", "plan", "read"]
