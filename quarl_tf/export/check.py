"""Check that a flatbuffer computes what its network does."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quarl_tf.foundation.errors import QuarlError
from quarl_tf.foundation.keras import keras
from quarl_tf.quantization import qat
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import CALIBRATED, Scheme
from quarl_tf.spec.actions import agreement

#: Largest difference between flatbuffer and network, relative to the largest head value (at least
#: 1): what float32 sums in another order may differ by. Sums over the 28224 bytes of four frames
#: differ by 2e-5 on some processors.
FLOAT_TOLERANCE = 5e-5

#: Observations, evenly spread, that the check compares heads on: so many or all if there are fewer,
#: up to twice as many where more are no multiple of it.
_CHECKED = 200

#: Of a quantisation-aware training: by how many steps each of the head's values may be off on
#: average, an observation counting for one at most, where a file spells the quantisers out and
#: where kernels round biases and sums to integers. Rounding a value to its grid changes it by 0.25.
_STEPS_APART, _STEPS_APART_NATIVE = 0.02, 0.25


def compare(
    policy: Policy, expected: keras.Model, observations: npt.NDArray[Any], *, aware: bool
) -> dict[str, Any]:
    """Compare heads with those of the network; a QuarlError where more than rounding differs."""
    seen = observations[:: max(1, len(observations) // _CHECKED)]
    # Not by XLA, which rounds a weight that training has left right between two codes to the other
    # one: it multiplies by the inverse of a step and adds in one operation.
    wanted = expected(seen, training=False).numpy()
    heads = np.stack([policy.head(observation) for observation in seen])
    name = policy.sidecar.scheme
    exact = name != "dynamic_int8" and not Scheme.parse(name).calibrated
    if policy.sidecar.num_actions is not None and name in CALIBRATED:
        # What all actions share is taken off some of them, and changes no choice.
        heads, wanted = (x - x.mean(axis=1, keepdims=True) for x in (heads, wanted))
    difference = float(np.abs(heads - wanted).max())
    scale = max(1.0, float(np.abs(wanted).max()))
    check: dict[str, Any] = {
        "observations": len(seen),
        "max_abs_difference": difference,
        "max_abs_head": scale,
    }
    if not aware:
        check["tolerance"] = FLOAT_TOLERANCE * scale if exact else None
        same = not exact or difference <= check["tolerance"]
    else:
        # Sums in another order, or in integers with biases rounded to theirs, may take the other
        # one of two neighbouring codes. In a hidden layer that may be many steps of a steep head,
        # so that each counts for one at most.
        steps = np.abs(heads - wanted) / qat.head_step(expected)
        check["mean_steps_apart"] = float(np.minimum(steps, 1.0).mean(axis=0).max())
        most = _STEPS_APART_NATIVE if name == "qat_int8" else _STEPS_APART
        same = check["mean_steps_apart"] <= most
    if not same:
        raise QuarlError(
            f"The {name} flatbuffer does not compute what its network does; nothing was written: "
            "export where it was trained, or report it. Received: "
            + ", ".join(f"{name}={value:g}" for name, value in check.items())
        )
    if policy.sidecar.num_actions is not None:
        check["action_agreement"] = agreement(heads, wanted, policy.sidecar.num_actions)
    return check
