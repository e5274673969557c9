"""Check an installation: versions, and known clashes between packages."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError

PACKAGE = "quarl-tf"


@dataclass(frozen=True)
class Finding:
    """Result of one check; the remedy is for a failed one."""

    name: str
    passed: bool
    observation: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks; those of packages for reports and training only where these are installed."""
    findings = [*_requirements(PACKAGE, extra=""), *_requirements(PACKAGE, extra="evaluate")]
    if _version("jinja2") is None and _version("tensorflow") is None:
        return [*findings, Finding("reports", True, "not installed: this machine can evaluate")]
    findings += _requirements(PACKAGE, extra="report")
    if _version("tensorflow") is None:
        observation = "not installed: this machine can evaluate and report"
        return [*findings, Finding("training", True, observation)]
    findings += _requirements(PACKAGE, extra="train")
    # Many machine-learning packages break its exact pin of typing-extensions.
    findings += _requirements("tf-agents", extra="")
    return [*findings, _keras_2(), _pygame(), _atari()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(package: str, extra: str) -> Iterator[Finding]:
    """Check what a package requires; with an extra, only what that extra adds."""
    if _version(package) is None:
        source = "." if package == PACKAGE else package
        yield Finding(package, False, "not installed", f"pip install {source}")
        return
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        required, always_required = (
            requirement.marker is None or requirement.marker.evaluate({"extra": name})
            for name in (extra, "")
        )
        if not required or (extra and always_required) or requirement.name == package:
            continue
        version = _version(requirement.name)
        passed = version is not None and requirement.specifier.contains(version, prereleases=True)
        yield Finding(
            requirement.name,
            passed,
            f"{version or 'not installed'} ({package} wants {requirement.specifier or 'any'})",
            f"pip install '{requirement.name}{requirement.specifier}'",
        )


def _keras_2() -> Finding:
    name = "Keras 2 is chosen"
    try:
        importlib.import_module("quarl_tf.foundation.keras")
    except QuarlError as error:
        missing = error.__cause__ is not None
        remedy = "pip install tf-keras" if missing else "set TF_USE_LEGACY_KERAS=1"
        return Finding(name, False, str(error), remedy)
    return Finding(name, True, "tf.keras is tf-keras")


def _pygame() -> Finding:
    fork = _version("pygame-ce")
    observation = f"pygame {_version('pygame')}"
    observation += f", overwritten by pygame-ce {fork}" if fork else ""
    remedy = "pip uninstall -y pygame-ce && pip install --force-reinstall pygame==2.1.3"
    return Finding("pygame is TF-Agents' own", fork is None, observation, remedy)


def _atari() -> Finding:
    name = "Atari games are registered"
    try:
        with native_output.caught():
            gymnasium = importlib.import_module("gymnasium")
            gymnasium.register_envs(importlib.import_module("ale_py"))
            gymnasium.make("PongNoFrameskip-v4").close()
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}", "pip install ale-py")
    return Finding(name, True, "PongNoFrameskip-v4 starts")
