"""Read a study's file: its cells, each in every seed and scheme."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quarl_tf import environments, presets
from quarl_tf.foundation import kinds
from quarl_tf.foundation.errors import UsageError
from quarl_tf.presets import Preset, tables
from quarl_tf.spec import GREEDY, REFERENCE, Chance, Quantization, Scheme
from quarl_tf.spec.cell import Cell, Column
from quarl_tf.spec.run import DEFAULT_EPISODES, Origin, Run, require_possible
from quarl_tf.spec.scheme import default_schemes
from quarl_tf.store.workspace import checked_report_name

X_AXES = ("steps", "episodes", "seconds")  #: What the report may draw learning curves against.

#: Keys of a cell that may also be at the top of a file, for all cells without them.
_SHARED_KEYS = {
    "seeds": kinds.listed("whole numbers", (int,)),
    "schemes": kinds.listed("names", (str,)),
    "bits": kinds.listed("whole numbers", (int,), least=0),
    "delays": kinds.listed("numbers", (int, float)),
    "quantization": kinds.MAPPING,
    "overrides": kinds.MAPPING,
}
#: What may be random in the episodes, as options of the command line.
_CHANCES = {"sample": kinds.FLAG, "sticky": kinds.PROBABILITY, "epsilon": kinds.PROBABILITY}
_CELL_KEYS = {"algo": kinds.NAME, "env": kinds.NAME, "remark": kinds.TEXT, "from": kinds.MAPPING}
#: Of trainings whose networks others start from: their overrides, and a hash for each seed.
_FROM_KEYS = {"overrides": kinds.MAPPING, "sha256": kinds.listed("hashes", (str,))}
_STUDY_KEYS = {
    "name": kinds.NAME,
    "title": kinds.TEXT,
    "cells": kinds.listed("cells", (dict,)),
    "episodes": kinds.COUNT,
    "skip_episodes": kinds.WHOLE,
    "presets": kinds.TEXT,
    "import": kinds.listed("names", (str,), least=0),
    "memory": kinds.FLAG,
    "x": kinds.one_of(X_AXES),
    **_CHANCES,
    **_SHARED_KEYS,
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """The checked content of a study's file, see `read`."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    env_ids: tuple[str, ...]  #: Of the cells' environments in the file, which may be old ones.
    chance: Chance
    episodes: int = DEFAULT_EPISODES
    skip_episodes: int = 0  #: Episodes before those, by which something was selected.
    memory: bool = False
    x: str = X_AXES[0]

    def experiments(self) -> list[tuple[Run, Scheme]]:
        """Return all experiments, those once that cells share."""
        columns = [column for cell in self.cells for column in cell.columns]
        pairs = [(run, column.scheme) for column in columns for run in column.runs]
        return list({(run.run_id, scheme.name): (run, scheme) for run, scheme in pairs}.values())


def read(path: Path) -> Study:
    """Read a study's file; a UsageError where a value is missing, unknown or invalid."""
    content = tables.parse_file(path, "a study")
    try:
        return _study(content, path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _study(content: Any, folder: Path) -> Study:
    values = _checked(content, "a study", _STUDY_KEYS, ("name", "cells"))
    name = checked_report_name(values["name"])
    modules = tuple(values.get("import", ()))
    environments.import_environments(modules)
    presets_file = str(folder / values["presets"]) if "presets" in values else None
    shared = {key: values[key] for key in _SHARED_KEYS if key in values}
    cells = []
    for number, entry in enumerate(values["cells"], start=1):
        try:
            cells.append(_cell({**shared, **entry}, modules, presets_file))
        except UsageError as error:
            raise UsageError(f"cell {number}: {error}") from error
        columns = [cell.columns for cell, _ in cells]
        if columns[-1] in columns[:-1]:
            raise UsageError(
                f"cell {number} says the same as an earlier one; leave it out, or change a seed, "
                f"an override or the bits. Received: cells {columns.index(columns[-1]) + 1} and "
                f"{number}"
            )
    chance = _chance(values)
    for cell, _ in cells:
        run = cell.references[0]
        environments.require_chance(run.env_id, chance, run.algo)
    return Study(
        name=name,
        title=values.get("title", name),
        cells=tuple(_titled(cells)),
        env_ids=tuple(entry["env"] for entry in values["cells"]),
        chance=chance,
        **{k: values[k] for k in ("episodes", "skip_episodes", "memory", "x") if k in values},
    )


def _checked(
    content: Any, what: str, keys: Mapping[str, kinds.Kind], needed: Sequence[str]
) -> dict[str, Any]:
    values = tables.mapping(content, what)
    kinds.require_all(values, keys, f"key of {what}")
    for key in needed:
        if key not in values:
            raise UsageError(f"{what} needs {key}. Received: {', '.join(values) or 'nothing'}")
    return values


def _chance(values: Mapping[str, Any]) -> Chance:
    chances = {name: values[name] for name in _CHANCES if values.get(name)}
    if len(chances) > 1:
        raise UsageError(
            f"Only one of {', '.join(_CHANCES)} may be in a study. Received: {', '.join(chances)}"
        )
    if "sticky" in chances:
        return Chance("sticky", float(chances["sticky"]))
    if "epsilon" in chances:
        return Chance("epsilon", float(chances["epsilon"]))
    return Chance("sampled") if chances else GREEDY


def _titled(cells: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Iterator[Cell]:
    """Yield the cells; those of one algorithm and environment say which settings differ."""
    for cell, settings in cells:
        differences = []
        for key, value in settings.items():
            others = [(o, o_settings.get(key)) for o, o_settings in cells if o.task == cell.task]
            if key == "delay":  # Which float trainings have none of.
                others = [(o, v) for o, v in others if any(c.scheme.aware for c in o.columns)]
            if any(other_value != value for _, other_value in others):
                differences.append(f"{key}={value}")
        yield replace(cell, distinction=", ".join(differences))


def _cell(
    entry: Mapping[str, Any], modules: tuple[str, ...], presets_file: str | None
) -> tuple[Cell, dict[str, Any]]:
    """Return a cell and its settings: overrides, options of quantisation, where it starts from."""
    values = _checked(entry, "a cell", _CELL_KEYS | _SHARED_KEYS, ("algo", "env", "seeds"))
    if "bits" not in values and (useless := values.keys() & {"quantization", "delays"}):
        raise UsageError(
            "Quantization and delays are for quantisation-aware training; add bits ([] for none). "
            f"Received: {sorted(useless)}"
        )
    env_id = environments.canonical_id(values["env"])
    overrides = values.get("overrides", {})
    base = Run(values["algo"], env_id, 0, overrides, modules=modules, presets=presets_file)
    preset = presets.of(base)
    seeds = sorted(values["seeds"])
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UsageError(f"Seeds are 0 or more, none comes twice. Received: seeds={seeds}")
    schemes = values.get("schemes", ["int8"])
    options = values.get("quantization", {})
    # Bits that are given twice, and a share of the steps that equals a number of them, count once.
    quantizations = list({q.tag: q for q in _quantizations(values, preset)}.values())
    # Columns of several delays name theirs.
    delays = {q.delay for q in quantizations} if "delays" in values else set()
    delay = {"delay": delays.pop()} if len(delays) == 1 else {}
    require_possible(base, map(Scheme.parse, schemes))
    settings = {**overrides, **(delay | options if quantizations else {})}
    runs = [replace(base, seed=seed) for seed in seeds]
    if "from" in values:
        origins = _origins(values["from"], runs, values["seeds"])
        runs = [replace(run, origin=origin) for run, origin in zip(runs, origins, strict=True)]
        settings["from"] = origins[0].run.seedless_id
    columns = tuple(_columns(runs, schemes, quantizations))
    return Cell(columns=columns, remark=values.get("remark", "")), settings


def _origins(content: Any, runs: Sequence[Run], seeds: Sequence[int]) -> list[Origin]:
    """Return what each of some trainings starts from; the hashes are in the order of `seeds`."""
    start = _checked(content, "from", _FROM_KEYS, ("sha256",))
    hashes, overrides = start["sha256"], start.get("overrides", {})
    presets.of(replace(runs[0], overrides=overrides))  # Refuses what is no setting.
    if len(hashes) != len(seeds):
        raise UsageError(
            "Each training starts from a network of its own; give a hash for each seed. "
            f"Received: seeds={seeds}, sha256={hashes}"
        )
    of_seed = dict(zip(seeds, hashes, strict=True))
    return [Origin(replace(run, overrides=overrides), of_seed[run.seed]) for run in runs]


def _columns(
    base: Sequence[Run], schemes: Sequence[str], quantizations: Sequence[Quantization]
) -> Iterator[Column]:
    """Yield the columns of some trainings, those of what others are compared with first.

    Of several delays, each names its own.
    """
    several_delays = len({quantization.delay for quantization in quantizations}) > 1
    # Quantised trainings are compared with what they start from, if they start from a network.
    compared = [replace(run, quantization=next(iter(quantizations), None)).plain for run in base]
    for quantization in (None, *quantizations):
        runs = tuple(replace(run, quantization=quantization) for run in base)
        runs = runs if quantization else tuple(compared)
        names = default_schemes(quantization) if quantization else (REFERENCE, *schemes)
        ending = f" from {quantization.delay:,}" if quantization and several_delays else ""
        for scheme in map(Scheme.parse, dict.fromkeys(names)):
            yield Column(scheme.name + ending, scheme, runs)


def _quantizations(values: Mapping[str, Any], preset: Preset) -> Iterator[Quantization]:
    """Yield one for each delay and bits; a delay is a number of steps or a share of them."""
    widths, delays = values.get("bits", []), values.get("delays", [0.5])
    options = values.get("quantization", {})
    if misplaced := sorted({"bits", "delay"} & set(options)):
        raise UsageError(
            "The key `bits` says the bits and `delays` the delays, quantization the rest. "
            f"Received: quantization={misplaced}"
        )
    if widths and preset.layer_norm:
        raise UsageError(
            "Quantisation-aware training has no rule for layer_norm; leave out that or bits. "
            f"Received: layer_norm=True, bits={widths}"
        )
    for delay in delays if widths else ():
        is_share = isinstance(delay, float)
        if is_share and not 0 < delay < 1:
            raise UsageError(
                "A delay is a number of steps, or a share of the training between 0 and 1. "
                f"Received: delay={delay}"
            )
        # Rounded down, except for errors of floats: 0.29 of 100 is 28.999999999999996.
        steps = int(round(delay * preset.steps, 6)) if is_share else delay
        presets.require_possible_delay(steps, preset)
        for bits in widths:
            yield presets.quantization(values["algo"], {**options, "bits": bits, "delay": steps})
