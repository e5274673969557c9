"""What is trained and how its numbers are represented: `Run` and `Scheme`.

Both are plain data whose *name is the specification*: every path of the project follows from a
`run_id` and a scheme's name alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quarl_tf.errors import UsageError, unknown

ALGORITHMS = ("a2c", "ddpg", "dqn", "ppo")

#: Weights only, by the papers' n-bit quantiser; 32 bits is the identity.
PTQ_BITS = range(2, 33)

_NATIVE_SCHEMES = {"fp32": 32, "fp16": 16, "dynamic_int8": 8, "int8": 8}

#: What `quarl run` exports when nothing else is asked for.
DEFAULT_SCHEMES = (*_NATIVE_SCHEMES, *(f"ptq_w{bits}" for bits in range(8, 1, -1)))


@dataclass(frozen=True)
class Run:
    """One training: an algorithm on an environment from a seed, with overrides of its preset."""

    algo: str
    env_id: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an unknown algorithm and a negative seed."""
        if self.algo not in ALGORITHMS:
            raise unknown("algorithm", self.algo, ALGORITHMS)
        if self.seed < 0:
            raise UsageError(f"The seed must be 0 or more. Received: seed={self.seed}")

    @property
    def run_id(self) -> str:
        """Name the run; overrides enter as a digest, so another preset is another run."""
        name = f"{self.algo}-{self.env_id.replace('/', '_')}-s{self.seed}"
        if not self.overrides:
            return name
        canonical = json.dumps(dict(self.overrides), sort_keys=True)
        return f"{name}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Scheme:
    """How a policy's numbers are represented; decode the name with `Scheme.parse`.

    | name           | weights       | activations | kernels                                  |
    |----------------|---------------|-------------|------------------------------------------|
    | `fp32`         | float32       | float32     | native                                   |
    | `fp16`         | float16       | float32     | native storage, float arithmetic         |
    | `dynamic_int8` | int8          | float32     | native, activations quantised per call   |
    | `int8`         | int8          | int8        | native, calibrated on rollouts           |
    | `ptq_wN`       | N-bit grid    | float32     | simulated: float values on the N-bit grid |
    | `ptq_paper_wN` | as published  | float32     | simulated: floored, one code too many    |

    Attributes:
        name: The name, which says all the rest.
        weight_bits: Width of a weight.
        native: Whether the flatbuffer stores and computes in those bits.
        mode: Rule of the affine quantiser (`quantization.affine`), for simulated schemes.
    """

    name: str
    weight_bits: int
    native: bool
    mode: Literal["code", "paper"] | None = None

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Decode a scheme's name.

        Raises:
            UsageError: No scheme has that name; the closest are named.
        """
        if name in _NATIVE_SCHEMES:
            return cls(name, _NATIVE_SCHEMES[name], native=True)
        match = re.fullmatch(r"ptq_(paper_)?w([1-9][0-9]*)", name)
        if match and int(match[2]) in PTQ_BITS:
            mode: Literal["code", "paper"] = "paper" if match[1] else "code"
            return cls(name, int(match[2]), native=False, mode=mode)
        raise unknown("scheme", name, DEFAULT_SCHEMES)
