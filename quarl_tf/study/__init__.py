"""A study: many experiments from one file, and what of them exists.

An experiment is one run in one scheme. Which ones a study has follows from its file, and how far
each is from the files of the workspace alone: nothing else is remembered, so a study that was
killed goes on where it was.
"""

from quarl_tf.store.state import State
from quarl_tf.study.design import Cell, Experiment, Study, differing_settings
from quarl_tf.study.file import read
from quarl_tf.study.status import Status, failure_path, plan, preset_of

__all__ = [
    "Cell",
    "Experiment",
    "State",
    "Status",
    "Study",
    "differing_settings",
    "failure_path",
    "plan",
    "preset_of",
    "read",
]
