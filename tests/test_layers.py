"""An import only ever points down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quarl_tf

PACKAGE = Path(quarl_tf.__file__).parent

#: From the top down: a module may import what stands in a lower line, never what stands beside it.
LAYERS = [
    {"cli"},
    {"arguments", "summary"},
    {"study.report", "study.runner"},
    {"study.figures"},
    {"study.results"},
    {"study", "study.trunks", "study.worker"},
    {"study.file", "study.status"},
    {"study.design"},
    {"report"},
    {"report.pages"},
    {"report.wording"},
    {"report.results"},
    {"training", "export", "evaluation", "plots"},  # The stages.
    {"plots.curves", "plots.precisions", "plots.schemes"},
    {"plots.style"},
    {"stream"},
    {"agents.a2c", "agents.ddpg", "agents.dqn", "agents.ppo"},
    {"agents.actor_critic", "agents.experience"},
    {"agents.distributions"},
    {"agents.policy_and_value"},
    {"agents.adapter", "agents.optimizers"},
    {"agents", "policies", "memory", "calibration", "replay", "statistics", "quantization"},
    {"quantization.int4", "quantization.ptq", "quantization.qat"},
    {"quantization.layer"},
    {"quantization.delayed"},
    {"networks", "execution", "progress", "quantization.toolkit"},
    {"scaling"},
    {"workspace"},
    {"records"},
    {"environments", "keras", "presets", "flatbuffer", "software", "checkpoints"},
    {"environments.afresh", "environments.atari", "environments.registry", "presets.tables"},
    {"quantization.affine", "spec", "seeding", "doctor", "display", "architectures", "processor"}
    | {"files"},
    {"errors", "native_output", ""},
]

FIGURES = {f"plots.{name}" for name in ("curves", "precisions", "schemes", "style")}

#: Who may know a library, directly.
KNOWN_BY = {
    "tensorflow": {"keras"},
    "tf_keras": {"keras"},
    "tf_agents": {"agents.adapter"},
    "tensorflow_probability": {"agents.adapter"},
    "ai_edge_litert": {"flatbuffer", "memory", "policies"},
    "matplotlib": FIGURES,
    "seaborn": FIGURES,
    "pandas": {"plots.curves"},
    "scipy": {"statistics"},
    "rich": {"cli", "display", "summary"},
    "litert_quantizer": {"quantization.int4"},
    "tensorflow_model_optimization": {"quantization.toolkit"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}

#: Who may use TensorFlow, through `quarl_tf.keras`.
USES_KERAS = {
    *("networks", "scaling", "execution", "progress", "training", "export"),
    *(f"quantization.{m}" for m in ("qat", "layer", "delayed", "toolkit")),
    *(m for m in MODULES if m.startswith("agents")),
}


def imports(name: str) -> Iterator[str]:
    """Yield every module that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            for alias in node.names:
                # `from quarl_tf import records` imports a module, `from quarl_tf.spec import Run`
                # a name in one.
                inside = f"{base}.{alias.name}"
                yield inside if inside.removeprefix("quarl_tf.") in MODULES else base


def own_imports(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = {m for m in imports(name) if m.split(".")[0] == "quarl_tf"}
    return {m.removeprefix("quarl_tf").removeprefix(".") for m in found}


def libraries(name: str) -> set[str]:
    return {m.split(".")[0] for m in imports(name)} - {"quarl_tf"}


def test_every_module_has_its_layer() -> None:
    placed = [name for layer in LAYERS for name in layer]
    assert sorted(placed) == sorted(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    layer = next(i for i, names in enumerate(LAYERS) if name in names)
    below = {module for names in LAYERS[layer + 1 :] for module in names}
    assert own_imports(name) - below == set()


def test_imports_are_found() -> None:
    assert {"spec", "training", "environments"} <= own_imports("cli")
    assert {"gymnasium", "numpy", "contextlib"} <= libraries("evaluation")
    assert "agents" in own_imports("agents.dqn")


@pytest.mark.parametrize("library", sorted(KNOWN_BY))
def test_libraries_are_known_in_one_place(library: str) -> None:
    assert {name for name in MODULES if library in libraries(name)} == KNOWN_BY[library]


def test_only_training_and_export_use_tensorflow() -> None:
    assert {name for name in MODULES if "keras" in own_imports(name)} <= USES_KERAS


def test_only_export_knows_the_converter_and_only_agents_know_tf_agents() -> None:
    knows = {name for name, path in MODULES.items() if "TFLiteConverter" in path.read_text()}
    assert knows == {"export"}
    knows = {name for name in MODULES if "agents.adapter" in own_imports(name)}
    assert {name.split(".")[0] for name in knows} == {"agents"}


def test_whatever_a_board_runs_imports_no_tensorflow() -> None:
    names = [
        *("spec", "records", "statistics", "presets", "environments", "quantization.affine"),
        *("policies", "evaluation", "plots", "report", "cli", "doctor"),
        *("study", "study.worker", "study.runner", "study.report"),
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module('quarl_tf.' + name)\n"
        "heavy = ('tensorflow', 'keras', 'tf_keras', 'tf_agents', 'tensorflow_probability')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_plain_trainings_do_without_the_toolkit() -> None:
    code = "import sys, quarl_tf.training\nsys.exit('tensorflow_model_optimization' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
