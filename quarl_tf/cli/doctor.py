"""Check an installation: versions, and a known clash between packages."""

from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

PACKAGE = "quarl-tf"

#: Extras, and packages that are hardly installed without them.
_EXTRAS = {
    "evaluate": {"rich"},
    "report": {"seaborn"},
    "train": {"tensorflow-model-optimization", "tf-agents"},
}


class Finding(NamedTuple):
    """A package and what was found of it; the remedy is empty where all is well."""

    package: str
    observation: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Check the packages that are required, those of an extra only where it is installed."""
    if _version(PACKAGE) is None:
        return [Finding(PACKAGE, "not installed", "pip install .")]
    findings = list(_requirements(PACKAGE, extra=""))
    for extra, signs in _EXTRAS.items():
        if any(map(_version, signs)):
            findings += _requirements(PACKAGE, extra)
    if _version("tf-agents") is not None:
        # Many machine-learning packages break its exact pin of typing-extensions.
        findings += _requirements("tf-agents", extra="")
        if _version("pygame-ce") is not None:
            remedy = "pip uninstall -y pygame-ce && pip install --force-reinstall pygame==2.1.3"
            findings.append(Finding("pygame-ce", "has overwritten TF-Agents' own pygame", remedy))
    return findings


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(package: str, extra: str) -> Iterator[Finding]:
    """Check what a package requires; with an extra, only what that extra adds."""
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        required, always_required = (
            requirement.marker is None or requirement.marker.evaluate({"extra": name})
            for name in (extra, "")
        )
        if not required or (extra and always_required) or requirement.name == PACKAGE:
            continue
        version = _version(requirement.name)
        passed = version is not None and requirement.specifier.contains(version, prereleases=True)
        yield Finding(
            requirement.name,
            f"{version or 'not installed'} ({package} wants {requirement.specifier or 'any'})",
            "" if passed else f"pip install '{requirement.name}{requirement.specifier}'",
        )
