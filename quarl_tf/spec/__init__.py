"""What is trained and how its numbers are represented, as plain data.

Every path of the project follows from a `Run` and the name of a scheme alone.
"""

from quarl_tf.spec.chance import GREEDY, Chance
from quarl_tf.spec.recipe import (
    FEW_BITS,
    INT4_BITS,
    PTQ_BITS,
    QAT_BITS,
    LayerFormat,
    QatSchedule,
    Quantization,
    Recipe,
    TensorFormat,
    require_layers,
)
from quarl_tf.spec.run import (
    ADOPTED,
    DEFAULT_EPISODES,
    Origin,
    Run,
    file_name,
    require_possible,
)
from quarl_tf.spec.scheme import (
    BASELINE,
    CALIBRATED,
    DEFAULT_SCHEMES,
    REFERENCE,
    Scheme,
    default_schemes,
    possible_schemes,
)

__all__ = [
    "ADOPTED",
    "BASELINE",
    "CALIBRATED",
    "DEFAULT_EPISODES",
    "DEFAULT_SCHEMES",
    "FEW_BITS",
    "GREEDY",
    "INT4_BITS",
    "PTQ_BITS",
    "QAT_BITS",
    "REFERENCE",
    "Chance",
    "LayerFormat",
    "Origin",
    "QatSchedule",
    "Quantization",
    "Recipe",
    "Run",
    "Scheme",
    "TensorFormat",
    "default_schemes",
    "file_name",
    "possible_schemes",
    "require_layers",
    "require_possible",
]
