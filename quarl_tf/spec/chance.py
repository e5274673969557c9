"""Randomness in evaluations."""

from dataclasses import dataclass
from typing import Literal, get_args

from quarl_tf.foundation import kinds

_Kind = Literal["greedy", "sampled", "epsilon", "sticky"]
_NONE = kinds.Kind(
    "left out, except of epsilon and sticky", lambda v: type(v) in (int, float) and v == 0
)


@dataclass(frozen=True)
class Chance:
    """The kind of randomness in an evaluation, and its probability.

    "greedy": none. "sampled": actions are drawn from the policy's distribution. "epsilon": an
    action is replaced by a random one. "sticky": a game repeats its last action at a frame (Machado
    et al., arXiv 1709.06009). The draws of an episode follow from its seed, the same for all
    schemes.
    """

    kind: _Kind = "greedy"
    probability: float = 0.0

    def __post_init__(self) -> None:
        """Raise a UsageError for an unknown kind, or a probability that it cannot have."""
        kinds.one_of(get_args(_Kind)).require("chance", self.kind)
        probability = kinds.PROBABILITY if self.kind in ("epsilon", "sticky") else _NONE
        probability.require("probability", self.probability)

    @property
    def name(self) -> str:
        """The part of file names; empty for greedy evaluations."""
        probability = f"{self.probability:g}" if self.probability else ""
        return "" if self == GREEDY else self.kind + probability

    @property
    def option(self) -> str:
        """The option of the command line, with a leading space; empty if greedy."""
        options = {"greedy": "", "sampled": " --sample"}
        return options.get(self.kind, f" --{self.kind} {self.probability!r}")

    @property
    def words(self) -> str:
        """A short description; empty if greedy."""
        words = {"greedy": "", "sampled": "sampled actions"}
        return words.get(self.kind, f"{self.kind} {self.probability:g}")

    @property
    def actions(self) -> str:
        """How actions are chosen, as recorded in protocols."""
        if self.kind == "epsilon":
            return f"{self.probability:g} random, else greedy"
        return "greedy" if self.kind == "sticky" else self.kind

    @property
    def sticky(self) -> float:
        """The probability that a game repeats its last action at a frame."""
        return self.probability if self.kind == "sticky" else 0.0


GREEDY = Chance()
