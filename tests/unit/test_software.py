"""What software and processor a result is made by is found out."""

import os
import platform
import subprocess
from pathlib import Path

import pytest
from samples import Patch

from quarl_tf.foundation import provenance


@pytest.mark.parametrize("installed", ["quarl_tf", ".venv/quarl_tf"])
def test_commit_is_of_this_project(installed: str, tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / installed
    package.mkdir(parents=True)
    (package / "software.py").write_text("code")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "-f", installed], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "foundation/provenance.py"))
    has_commit = provenance.source_commit.__wrapped__() is not None
    assert has_commit == (installed == "quarl_tf")


_AMD = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2 {}\n"
_ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm{}\nCPU part\t: 0xd03\n"


@pytest.mark.parametrize(
    ("information", "described"),
    [
        (_AMD.format(""), "AMD EPYC with avx2"),
        (_AMD.format("avx512f avx512bw avx512_bf16"), "AMD EPYC with avx512_bf16"),
        (_AMD.format("amx_bf16 avx512_bf16"), "AMD EPYC with amx_bf16"),
        (_ARM.format(""), f"{platform.machine()} 0xd03 with asimd"),
        ("", platform.machine()),
    ],
)
def test_processors_have_a_name_and_their_best_extension(information: str, described: str) -> None:
    assert provenance.describe_processor(information) == described


def test_cores_are_known_on_every_system(monkeypatch: Patch) -> None:
    monkeypatch.delattr(provenance.os, "sched_getaffinity", raising=False)  # As on macOS.
    assert provenance.available_cores() == [*range(os.cpu_count() or 1)]
