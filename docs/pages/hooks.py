"""Turn equations of a page into MathML, and links to reports into those of their pages."""

import re
from typing import Any

from latex2mathml import converter

_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_BLOCK = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"\$([^$\n]+?)\$")

#: Links of the repository by those of the site, which is one folder deeper.
_LINKS = (
    (re.compile(r"\.\./reports/([\w-]+)/report\.md"), r"reports/\1.md"),
    (re.compile(r"\.\./reports/"), "reports/"),
    (re.compile(r"\.\./benchmarks/\w+\.md"), "results/benchmarks.md"),
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links, and the equations outside of code."""
    for link, page in _LINKS:
        markdown = link.sub(page, markdown)
    parts = _CODE.split(markdown)
    parts[::2] = [_INLINE.sub(_inline, _BLOCK.sub(_block, part)) for part in parts[::2]]
    return "".join(parts)


def _block(match: re.Match[str]) -> str:
    return f'<div class="equation">{converter.convert(match[1].strip(), display="block")}</div>'


def _inline(match: re.Match[str]) -> str:
    # Within a span: Markdown takes an unknown element at the start of a line for a block.
    return f"<span>{converter.convert(match[1])}</span>"
