"""What an evaluation leaves to chance."""

from typing import Literal, NamedTuple


class Chance(NamedTuple):
    """What is left to chance in an evaluation, with which probability.

    "greedy": nothing. "sampled": actions are drawn from the policy's distribution. "epsilon": an
    action is replaced by a random one. "sticky": a game repeats its last action at a frame (Machado
    et al., arXiv 1709.06009). Every episode's chance follows from its seed, so that all schemes
    meet the same.
    """

    kind: Literal["greedy", "sampled", "epsilon", "sticky"] = "greedy"
    probability: float = 0.0

    @property
    def name(self) -> str:
        """Return what files of such evaluations are called after; empty for the usual ones."""
        return "" if self == GREEDY else self.kind + f"{self.probability:g}" * bool(self[1])

    @property
    def option(self) -> str:
        """Return the option of the command line, a space before it."""
        return {"greedy": "", "sampled": " --sample"}.get(self.kind, f" --{self._words}")

    @property
    def words(self) -> str:
        """Return it in a few words; empty if nothing is left to chance."""
        return {"greedy": "", "sampled": "sampled actions"}.get(self.kind, self._words)

    @property
    def _words(self) -> str:
        return f"{self.kind} {self.probability:g}"

    @property
    def actions(self) -> str:
        """Return how a policy's actions are chosen, as protocols say it."""
        if self.kind == "epsilon":
            return f"{self.probability:g} random, else greedy"
        return "greedy" if self.kind == "sticky" else self.kind

    @property
    def sticky(self) -> float:
        """Return the probability that a game repeats its last action at a frame."""
        return self.probability if self.kind == "sticky" else 0.0


GREEDY = Chance()
