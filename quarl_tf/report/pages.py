"""Write the pages of a report from their templates, with what its results were made by."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from quarl_tf.evaluation.compare import MIN_EPISODES
from quarl_tf.foundation.files import write_bytes, write_text
from quarl_tf.foundation.provenance import SEVERAL, UNKNOWN_COMMIT, UNKNOWN_PROCESSOR
from quarl_tf.report import figures
from quarl_tf.report.results import LoadedRun
from quarl_tf.report.wording import dtypes, limits, made_with, number_text, percent, ratio, size


def write_pages(
    folder: Path, template: str, context: Mapping[str, Any], pictures: Mapping[str, bytes]
) -> Path:
    """Write pictures, report.md and index.html, and remove the pictures of an earlier report.

    Args:
        folder: The report's folder.
        template: Name of the templates, without `.md.j2` and `.html.j2`.
        context: What the templates show.
        pictures: File name to PNG.

    Returns:
        The path of index.html, which has the pictures within it.
    """
    for stale in (folder / "figures").glob("*.png"):
        if stale.name not in pictures:
            stale.unlink()
    for file, content in pictures.items():
        write_bytes(folder / "figures" / file, content)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quarl_tf.report"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": number_text,
        "percent": percent,
        "unseen": _unseen_percent,
        "size": size,
        "dtypes": dtypes,
        "made_with": made_with,
        "alt": lambda file: file.removesuffix(".png").replace("_", " "),
        "colour": figures.scheme_colour,
    }
    everything = {**context, "limits": limits, "ratio": ratio, "min_episodes": MIN_EPISODES}
    encoded = {
        file: f"data:image/png;base64,{base64.b64encode(content).decode()}"
        for file, content in pictures.items()
    }
    page = environment.get_template(f"{template}.html.j2").render(everything, pictures=encoded)
    text = environment.get_template(f"{template}.md.j2").render(everything)
    write_text(folder / "report.md", text)
    write_text(folder / "index.html", page)
    return folder / "index.html"


def provenance(runs: Sequence[LoadedRun]) -> dict[str, Any]:
    """Collect commits and processors behind the results, and packages of export and evaluation."""
    results = [one for run in runs for one in run.results.values()]
    versions = dict[str, set[str]]()
    commits: dict[str, set[str]] = {"trained": set(), "exported": set()}
    processors: dict[str, set[str]] = {"trained": set(), "evaluated": set()}
    for sidecar, evaluation in ((one.sidecar, one.evaluation) for one in results):
        commits["trained"] |= set((sidecar.trained_commit or UNKNOWN_COMMIT).split(SEVERAL))
        commits["exported"].add(sidecar.commit or UNKNOWN_COMMIT)
        processors["trained"] |= set((sidecar.trained_on or UNKNOWN_PROCESSOR).split(SEVERAL))
        processors["evaluated"].add(evaluation.processor or UNKNOWN_PROCESSOR)
        for package, version in (*sidecar.versions.items(), *evaluation.versions.items()):
            versions.setdefault(package, set()).add(version)
    return {
        "commits": {what: sorted(found) for what, found in commits.items()},
        "versions": {package: sorted(found) for package, found in sorted(versions.items())},
        "processors": {what: sorted(found) for what, found in processors.items()},
    }


def _unseen_percent(episodes: int) -> float:
    """Return how often an event may occur and still, at 95 %, not be seen in so many episodes."""
    return float(100 * (1 - 0.05 ** (1 / episodes)))
