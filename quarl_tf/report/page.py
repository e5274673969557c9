"""Render the pages of a report from their templates."""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2.runtime import Macro

from quarl_tf.evaluation.compare import INCONCLUSIVE, MIN_EPISODES, UNSEEN, Interval, unseen_percent
from quarl_tf.foundation.files import write_bytes, write_text
from quarl_tf.report.figures.style import scheme_colour
from quarl_tf.report.results import Result

_UNKNOWN = "\N{EN DASH}"

#: Bytes above which a page omits the policies that it would play, or their film.
LARGEST_PLAYING = 1_000_000


def write_pages(folder: Path, context: Mapping[str, Any], pictures: Mapping[str, bytes]) -> Path:
    """Write PNGs by file name, report.md and index.html, whose path is returned.

    Pictures of an earlier report are removed.
    """
    for stale in (folder / "figures").glob("*.png"):
        if stale.name not in pictures:
            stale.unlink()
    encoded = {}
    for file, content in pictures.items():
        write_bytes(folder / "figures" / file, content)
        encoded[file] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    for template, file in (("report.md.j2", "report.md"), ("report.html.j2", "index.html")):
        page = templates().get_template(template)
        text = page.render(context, pictures=encoded)
        if len(text.encode()) > LARGEST_PLAYING:
            text = page.render(context, pictures=encoded, play=None, film=None)
        write_text(folder / file, text)
    return folder / "index.html"


@cache
def templates() -> jinja2.Environment:
    """Return the templates, with the sentences of `words.j2` as filters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quarl_tf.report"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number=number_text, percent=percent, share=share, times=times, size=size, limits=limits
    )
    environment.filters.update(dtypes=dtypes, unseen=unseen_percent, colour=scheme_colour)
    environment.globals.update(
        min_episodes=MIN_EPISODES, inconclusive=INCONCLUSIVE, unseen_verdict=UNSEEN
    )
    # Called as filters, macros give plain text, which each page escapes in its own way.
    words = vars(environment.get_template("words.j2").module)
    environment.filters.update({k: v for k, v in words.items() if isinstance(v, Macro)})
    return environment


def provenance(results: Sequence[Result]) -> dict[str, dict[str, list[str]]]:
    """Collect the commits, processors and package versions of results."""
    commits, processors, versions = (defaultdict[str, set[str]](set) for _ in range(3))
    for result in results:
        sidecar, evaluation = result.sidecar, result.evaluation
        commits["trained"] |= set(sidecar.trained_commits) or {"an unknown commit"}
        commits["exported"].add(sidecar.commit or "an unknown commit")
        processors["trained"] |= set(sidecar.trained_on) or {"an unknown processor"}
        processors["evaluated"].add(evaluation.processor or "an unknown processor")
        for package, version in (*sidecar.versions.items(), *evaluation.versions.items()):
            versions[package].add(version)
    return {
        "commits": {stage: sorted(values) for stage, values in commits.items()},
        "processors": {stage: sorted(values) for stage, values in processors.items()},
        "versions": {package: sorted(values) for package, values in sorted(versions.items())},
    }


def number_text(value: float | None, unit: str = "") -> str:
    """Format a return or a latency with decimals below 1000; None is a dash."""
    if value is None:
        return _UNKNOWN
    if value == 0:
        return f"0{unit}"
    magnitude = abs(value)
    digits = 0 if magnitude >= 1000 else 1 if magnitude >= 10 else 2
    text = f"{value:,.{digits}f}" if magnitude >= 0.01 else f"{value:.1g}"
    return text.replace("-", "\N{MINUS SIGN}") + unit


def percent(value: float | None) -> str:
    """Format a percentage; below a ten-thousandth it is 0."""
    return number_text(None if value is None else round(value, 4), " %")


def share(fraction: float | None) -> str:
    """Format a fraction as a percentage."""
    return percent(None if fraction is None else 100 * fraction)


times = partial(number_text, unit="\N{MULTIPLICATION SIGN}")


def size(value: float | None) -> str:
    """Format a number of bytes."""
    if value is None:
        return _UNKNOWN
    for unit, step in (("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= step:
            return f"{value / step:.1f} {unit}"
    return f"{value:.0f} B"


def limits(interval: Interval | None) -> str:
    """Format the limits of an interval, if there are any."""
    if interval is not None and interval.bounded:
        return f"[{number_text(interval.low)}, {number_text(interval.high)}]"
    return "[all equal]" if interval is not None and interval.alike else "[no interval]"


def dtypes(counts: Mapping[str, int]) -> str:
    """Format the number of weights by dtype, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {dtype}" for dtype, count in ordered)
