"""What is trained and how its numbers are represented, as plain data.

A `Run` and the name of a scheme determine every path of the project.
"""

from quarl_tf.spec.chance import GREEDY, Chance
from quarl_tf.spec.recipe import LayerFormat, QatSchedule, Quantization, Recipe, TensorFormat
from quarl_tf.spec.run import ADOPTED, DEFAULT_MARGIN_PERCENT, Origin, Run, require_possible
from quarl_tf.spec.scheme import BASELINE, DEFAULT_SCHEMES, INT8_SCHEMES, REFERENCE, Scheme
