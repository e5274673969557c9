"""What software a result is made by is found out."""

from __future__ import annotations

import re

import numpy as np

from quarl_tf import software


def test_versions_are_those_imported() -> None:
    versions = software.package_versions()
    assert versions["numpy"] == np.__version__
    assert "quarl-tf" in versions


def test_commit_is_one_or_unknown() -> None:
    commit = software.source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{12,40}(-dirty)?", commit)
