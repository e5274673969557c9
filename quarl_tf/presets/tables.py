"""Read tables of presets: the package's and a user's file."""

import re
import reprlib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from quarl_tf.foundation.errors import UsageError, one_line, require_known

#: Raw values by key, by environment.
Table = dict[str, dict[str, Any]]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 and 1e6 are numbers, not text, and duplicate keys are errors."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                raise yaml.MarkedYAMLError(None, None, f"{name!r} comes twice", key.start_mark)
            names.add(name)
        return node


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    value: float = loader.construct_yaml_float(node)
    # 1e6 is 1000000, also in a run's id.
    return int(value) if "e" in node.value.lower() and value.is_integer() else value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def parse(text: str | bytes) -> Any:
    """Parse YAML; a ValueError of one line names what is invalid and where."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{where}{error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(error)) from error


def parse_file(path: Path, what: str) -> Any:
    """Parse a user's YAML file, called the file of `what` in a UsageError."""
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        flaw = f"is no sound YAML ({error}); fix it"
        if isinstance(error, OSError):
            flaw = f"cannot be read ({error.strerror}); name a YAML file"
        raise UsageError(f"The file of {what} {flaw}. Received: path={str(path)!r}") from error


@cache
def shipped(algo: str) -> Table:
    """Read the package's presets of an algorithm, and its defaults as "quantization".

    They are read once: callers copy what they change.
    """
    return _without_templates(parse(Path(__file__).with_name(f"{algo}.yaml").read_bytes()))


def read(path: Path, algorithms: Collection[str]) -> dict[str, Table]:
    """Read a file of presets: by algorithm, environment and key."""
    content = parse_file(path, "presets")
    for algo, table in mapping(content, f"The top of {path}", "algorithms").items():
        require_known(f"algorithm at the top of {path}", algo, algorithms)
        for env_id, values in mapping(table, f"{algo} in {path}", "environments").items():
            if env_id == "quantization":
                raise UsageError(
                    "Defaults of quantisation are the package's; give -q, in a study quantization. "
                    f"Received: {algo}.quantization in {path}"
                )
            mapping(values, f"{env_id} below {algo} in {path}", "preset keys")
    return {algo: _without_templates(table) for algo, table in content.items()}


def _without_templates(table: Table) -> Table:
    """Leave out templates for other entries (`.atari: &atari`)."""
    return {name: values for name, values in table.items() if not name.startswith(".")}


def mapping(value: Any, what: str, names: str = "names") -> dict[str, Any]:
    """Require a mapping with string keys; `what` and `names` describe both in the error."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{what} must map {names} to values. Received: {reprlib.repr(value)}")
    return value
