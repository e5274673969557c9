"""One training as plain data, which determines its name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quarl_tf.foundation import kinds
from quarl_tf.foundation.errors import UsageError
from quarl_tf.foundation.files import digest
from quarl_tf.spec.recipe import Quantization
from quarl_tf.spec.scheme import REFERENCE, Scheme, default_schemes, possible_schemes

DEFAULT_EPISODES = 100  #: Episodes of an evaluation, as in the papers.
DEFAULT_MARGIN_PERCENT = 2.0  #: Losses up to this share of the fp32 return are acceptable.
ADOPTED = "adopted"  #: The algorithm of a policy that others trained.


def _is_plain(values: Any) -> bool:
    try:
        return kinds.MAPPING.fits(values) and bool(digest(values))
    except (TypeError, ValueError):
        return False


_PLAIN = kinds.Kind("a mapping of names to values of JSON", _is_plain)
_MODULES = kinds.Kind(
    "a tuple of texts", lambda v: isinstance(v, tuple | list) and all(map(kinds.TEXT.fits, v))
)


@dataclass(frozen=True)
class Run:
    """One training: an algorithm on an environment from a seed, with overrides of its preset.

    With a `quantization` it is quantisation-aware; with an `origin` it starts from the network of
    another training, or continues a saved one. The user's `modules` that register environments and
    file of `presets` are part of its command, not of its name. An `ADOPTED` policy has a flatbuffer
    and no training: its overrides are the `name` and the `head` it was adopted with.
    """

    algo: str
    env_id: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    quantization: Quantization | None = None
    modules: tuple[str, ...] = field(default=(), compare=False)
    presets: str | None = field(default=None, compare=False)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        """Raise a UsageError for a field of another kind, or an origin that does not fit."""
        kinds.NAME.require("algo", self.algo)
        kinds.NAME.require("env_id", self.env_id)
        kinds.WHOLE.require("seed", self.seed)
        _PLAIN.require("overrides", self.overrides)
        # The caller may change their own for the next run.
        object.__setattr__(self, "overrides", deepcopy(dict(self.overrides)))
        _MODULES.require("modules", self.modules)
        object.__setattr__(self, "modules", tuple(self.modules))
        if self.presets is not None:
            kinds.TEXT.require("presets", self.presets)
        if not isinstance(self.quantization, Quantization | None):
            raise UsageError(
                "The quantization of a run is made by quarl_tf.presets.quantization. "
                f"Received: quantization={self.quantization!r}"
            )
        name = self.overrides.get("name")
        if self.adopted and not (isinstance(name, str) and re.fullmatch(r"\w[\w.]*", name)):
            raise UsageError(
                "The name of an adopted policy is letters, digits, '_' and '.'. "
                f"Received: name={name!r}"
            )
        if not isinstance(self.origin, Origin | None):
            raise UsageError(
                f"The origin of a run is an argument of train. Received: origin={self.origin!r}"
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
        """The run's name; overrides enter as a digest, so another preset is another run."""
        return f"{self._task}-{self.folder}"

    @property
    def folder(self) -> str:
        """The folder of its flatbuffers, below its environment and algorithm."""
        origin = [] if self.origin is None else [self.origin.tag]
        return "-".join([f"s{self.seed}", *self._settings, *origin])

    @property
    def seedless_id(self) -> str:
        """The name of the runs that differ from this one only in their seed."""
        origin = [] if self.origin is None else [f"from-{self.origin.run.seedless_id}"]
        if self.origin is not None and self.origin.step:
            origin.append("saved")
        return "-".join([self._task, *self._settings, *origin])

    @property
    def _task(self) -> str:
        return f"{self.algo}-" + re.sub("[/:]", "_", self.env_id)

    @property
    def _settings(self) -> list[str]:
        if self.adopted:
            return [self.overrides["name"]]
        tags = [digest(self.overrides)] if self.overrides else []
        return [*tags, self.quantization.tag] if self.quantization else tags

    @property
    def plain(self) -> Run:
        """The run it is compared with: its origin, or the same training without quantisation."""
        if self.quantization is not None and self.origin is not None:
            return self.origin.run.plain
        return replace(self, quantization=None)

    @property
    def needed(self) -> Run | None:
        """The run that comes first: its reference, or the one whose network it starts from."""
        if self.quantization is not None:
            return self.plain
        return self.origin.run if self.origin is not None and not self.origin.step else None

    @property
    def default_schemes(self) -> tuple[str, ...]:
        """The names of the schemes that it is exported as by default."""
        names = default_schemes(self.quantization)
        return tuple(name for name in names if self.can_be(Scheme.parse(name)))

    def can_be(self, scheme: Scheme) -> bool:
        """Tell whether it can be exported as a scheme."""
        if self.adopted:
            return scheme.post_training or scheme.name == REFERENCE
        if self.quantization is None:
            return not scheme.aware
        return scheme.name in possible_schemes(self.quantization)

    @property
    def imports(self) -> str:
        """The options that import its environment."""
        return "".join(f" --import {module}" for module in self.modules)

    def command(self, verb: str) -> str:
        """Return the command line of a verb for this run, of `adopt` for an adopted one."""
        words = ["quarl"]
        words += ["adopt", "FILE"] if self.adopted else [verb, "--algo", self.algo]
        words += ["--env", self.env_id, "--seed", f"{self.seed}"]
        for name, value in self.overrides.items():
            words += [f"--{name}", value] if self.adopted else _option("-p", name, value)
        words += self.imports.split()
        if self.presets is not None:
            words += ["--presets", self.presets]
        if self.origin is not None:
            words += ["--from", self.origin.file or self.origin.run.run_id]
        if self.quantization is not None:
            schedule = self.quantization.schedule
            # Always given, as an algorithm's defaults may differ.
            options: dict[str, Any] = {"ranges": schedule.ranges, "gradient": schedule.gradient}
            options |= self.quantization.options()
            words += ["--bits", str(options.pop("bits"))]
            words += ["--quant-delay", str(options.pop("delay"))]
            for name, value in options.items():
                words += _option("-q", name, value)
        return shlex.join(words)

    def commands(self, scheme: str) -> str:
        """Return the commands that make a scheme anew in another folder, with what it needs."""
        first = "" if self.needed is None else f"{self.needed.commands(REFERENCE)} && "
        return f"{first}{self.command('run')} --schemes {scheme} --root DIR"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values, without None."""
        values = asdict(self) | {"modules": list(self.modules) or None}
        if self.quantization is not None:
            values["quantization"] = self.quantization.to_dict()
        if self.origin is not None:
            values["origin"] = self.origin.to_dict()
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Invert `to_dict`."""
        fields = dict(values)
        if (quantization := values.get("quantization")) is not None:
            fields["quantization"] = Quantization.restore(quantization)
        if (origin := values.get("origin")) is not None:
            fields["origin"] = Origin(**{**origin, "run": cls.from_dict(origin["run"])})
        return cls(**fields)


@dataclass(frozen=True)
class Origin:
    """The network of another training that one starts from, or the file of a saved training."""

    run: Run
    network_sha256: str  #: Of the network, or of that file.
    step: int = 0  #: Environment steps of the saved training; 0 to start from the network alone.
    file: str = field(default="", compare=False)

    @property
    def tag(self) -> str:
        """Its part of run ids."""
        return f"from{digest({'run': self.run.run_id, 'network_sha256': self.network_sha256})}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        values = {"run": self.run.to_dict(), "network_sha256": self.network_sha256}
        return values | ({"step": self.step, "file": self.file} if self.step else {})


def _option(option: str, name: str, value: Any) -> list[str]:
    """Return NAME=VALUE for the command line; names need no quotes."""
    is_name = isinstance(value, str) and value.isidentifier()
    return [option, f"{name}={value if is_name else json.dumps(value)}"]


def require_possible(run: Run, schemes: Iterable[Scheme]) -> None:
    """Raise a UsageError for schemes of another kind of training, or of other bits."""
    possible = run.default_schemes if run.adopted else possible_schemes(run.quantization)
    for scheme in schemes:
        if not run.can_be(scheme):
            others = "" if run.quantization else " or another post-training scheme (`quarl list`)"
            if scheme.aware and others and not run.adopted:
                others += (
                    "; a quantisation-aware one needs a training with --bits (in a study, bits)"
                )
            raise UsageError(
                f"{run.run_id} can be exported as {', '.join(possible)}{others}. "
                f"Received: scheme={scheme.name!r}"
            )
