"""One training, as plain data; its name follows from it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import digest
from quarl_tf.spec.recipe import Quantization
from quarl_tf.spec.scheme import REFERENCE, Scheme, default_schemes, possible_schemes

#: Episodes of an evaluation, as in the papers.
DEFAULT_EPISODES = 100

#: Stands where the algorithm does, of a policy that others trained.
ADOPTED = "adopted"


@dataclass(frozen=True)
class Run:
    """One training: an algorithm on an environment from a seed, with overrides of its preset.

    With a `quantization` it is quantisation-aware; with an `origin` it starts from the network of
    another training, or goes on where one was saved. The user's modules that register environments
    and file of presets belong to its command, not to its name. Of an `ADOPTED` policy there is a
    flatbuffer and no training: its overrides are the `name` and the `head` it was adopted with.
    """

    algo: str
    env_id: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None
    modules: tuple[str, ...] = field(default=(), compare=False)
    presets: str | None = field(default=None, compare=False)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        """Refuse a negative seed, an adopted policy without a name, and an origin of no use."""
        if self.seed < 0:
            raise UsageError(f"The seed must be 0 or more. Received: seed={self.seed}")
        name = self.overrides.get("name")
        if self.adopted and not (isinstance(name, str) and re.fullmatch(r"\w[\w.]*", name)):
            raise UsageError(
                "The name of an adopted policy is letters, digits, '_' and '.'. "
                f"Received: name={name!r}"
            )
        if self.origin is not None:
            self._check_origin(self.origin.run, saved=self.origin.step > 0)

    def _check_origin(self, origin: Run, *, saved: bool) -> None:
        if (origin.algo, origin.env_id) != (self.algo, self.env_id):
            raise UsageError(
                "A training starts from a network of its own algorithm and environment. "
                f"Received: --algo {self.algo} --env {self.env_id} from {origin.run_id}"
            )
        if origin.quantization is not None and not saved:
            raise UsageError(
                "A training starts from one that is not quantisation-aware. "
                f"Received: run={origin.run_id!r}"
            )
        if self.quantization is not None and self.seed != origin.seed:
            raise UsageError(
                "A quantisation-aware training is compared with the run that it starts from, on "
                f"the same episodes: give --seed {origin.seed}. Received: seed={self.seed}"
            )

    @property
    def adopted(self) -> bool:
        """Whether others trained it."""
        return self.algo == ADOPTED

    @property
    def run_id(self) -> str:
        """Name the run; overrides enter as a digest, so another preset is another run."""
        return f"{self._task}-{self.folder}"

    @property
    def folder(self) -> str:
        """Name the folder of its flatbuffers, within those of its environment and algorithm."""
        start = [] if self.origin is None else [self.origin.tag]
        return "-".join([f"s{self.seed}", *self._settings, *start])

    @property
    def seedless_id(self) -> str:
        """Name the runs that differ from this one in their seed alone."""
        start = [] if self.origin is None else [f"from-{self.origin.run.seedless_id}"]
        return "-".join([self._task, *self._settings, *start])

    @property
    def _task(self) -> str:
        return f"{self.algo}-{file_name(self.env_id)}"

    @property
    def _settings(self) -> list[str]:
        if self.adopted:
            return [self.overrides["name"]]
        overridden = [digest(self.overrides)] if self.overrides else []
        return [*overridden, self.quantization.tag] if self.quantization else overridden

    @property
    def plain(self) -> Run:
        """What it is compared with: where it starts, or the same training without quantisation."""
        if self.quantization is not None and self.origin is not None:
            return self.origin.run.plain
        return replace(self, quantization=None)

    @property
    def default_schemes(self) -> tuple[str, ...]:
        """Return the names of what is exported of it when nothing else is asked for."""
        usual = default_schemes(self.quantization)
        if not self.adopted:
            return usual
        return tuple(n for n in usual if n == REFERENCE or Scheme.parse(n).post_training)

    def command(self, verb: str) -> str:
        """Write the command line of a verb for this run; an adopted one has none but `adopt`."""
        what = ["adopt", "FILE.tflite"] if self.adopted else [verb, "--algo", self.algo]
        words = ["quarl", *what, "--env", self.env_id, "--seed", f"{self.seed}"]
        for name, value in self.overrides.items():
            words += (
                [f"--{name}", f"{value}"] if self.adopted else ["-p", f"{name}={_written(value)}"]
            )
        for module in self.modules:
            words += ["--import", module]
        if self.presets is not None:
            words += ["--presets", self.presets]
        if self.origin is not None:
            words += ["--from", self.origin.file or self.origin.run.run_id]
        if self.quantization is not None:
            words += ["--bits", f"{self.quantization.bits}"]
            words += ["--quant-delay", f"{self.quantization.delay}"]
            # What a preset may say is said, whatever it says.
            schedule = self.quantization.schedule
            said = {"ranges": schedule.ranges, "gradient": schedule.gradient}
            for name, value in {**said, **self.quantization.options()}.items():
                words += ["-q", f"{name}={_written(value)}"]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values, without those that say nothing."""
        how = None if self.quantization is None else self.quantization.to_dict()
        start = None if self.origin is None else self.origin.to_dict()
        values = asdict(self) | {"quantization": how, "origin": start}
        values["modules"] = list(self.modules) or None
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Take `to_dict` back."""
        quantization = values.get("quantization")
        known = None if quantization is None else Quantization.restore(quantization)
        modules = tuple(values.get("modules", ()))
        start = values.get("origin")
        origin = start and Origin(**{**start, "run": Run.from_dict(start["run"])})
        return cls(**{**values, "quantization": known, "modules": modules, "origin": origin})


@dataclass(frozen=True)
class Origin:
    """The network of another training that one starts from, or the file that it was saved to.

    Attributes:
        network_sha256: Of the network, or of that file.
        step: Environment steps after which it goes on; 0 where it begins with the network alone.
    """

    run: Run
    network_sha256: str
    step: int = 0
    file: str = field(default="", compare=False)

    @property
    def tag(self) -> str:
        """Name it for run ids."""
        return f"from{digest({'run': self.run.run_id, 'network_sha256': self.network_sha256})}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        start = {"run": self.run.to_dict(), "network_sha256": self.network_sha256}
        return start | ({"step": self.step, "file": self.file} if self.step else {})


def _written(value: Any) -> str:
    """Write a value for the command line, where a name needs no quotes."""
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)


def file_name(env_id: str) -> str:
    """Return an environment's id as part of a file's name."""
    return re.sub("[/:]", "_", env_id)


def require_possible(run: Run, schemes: Iterable[Scheme]) -> None:
    """Raise a UsageError for schemes of another kind of training, or of other bits."""
    possible = run.default_schemes if run.adopted else possible_schemes(run.quantization)
    for scheme in schemes:
        fits = not scheme.aware if run.quantization is None else scheme.name in possible
        if run.adopted:
            fits = scheme.post_training or scheme.name == REFERENCE
        if not fits:
            raise UsageError(
                f"{run.run_id} can be exported as {', '.join(possible)}. "
                f"Received: scheme={scheme.name!r}"
            )
