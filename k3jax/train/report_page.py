"""The report as one HTML page: style sheet and pictures inside, nothing fetched from anywhere."""

import base64
import html
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Fact(NamedTuple):
    """A headline number: what it is, its value, and a remark."""

    label: str
    value: str
    note: str = ""


class Picture(NamedTuple):
    """A PNG image with a name for its file, a text for who cannot see it, and a caption."""

    name: str
    image: bytes
    alternative: str
    caption: str


class Grid(NamedTuple):
    """A table of text: headings, rows, how many columns are words, and the cells (row, column) that stand out."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    strong: Collection[tuple[int, int]] = ()


class Section(NamedTuple):
    """A heading and what comes below it; empty parts are left out.

    Attributes:
        title: the heading.
        note: a sentence below it.
        facts: headline numbers.
        grids: tables.
        pictures: in order.
        texts: (title, preformatted text), folded away except the first.
    """

    title: str
    note: str = ""
    facts: Sequence[Fact] = ()
    grids: Sequence[Grid] = ()
    pictures: Sequence[Picture] = ()
    texts: Sequence[tuple[str, str]] = ()


STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --muted: #667080; --page: #f6f7f9; --card: #fff; --line: #dfe3e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --muted: #9aa4b2; --page: #15181c; --card: #1e2227; --line: #343a42; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 0.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.75rem; }
nav { font-size: 0.9rem; }
nav a { margin-right: 1rem; color: inherit; white-space: nowrap; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.6rem; margin: 0; }
.facts div, figure, details, .grid { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.facts div { padding: 0.6rem 0.8rem; }
.facts dt { color: var(--muted); font-size: 0.85rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts small { display: block; color: var(--muted); font-size: 0.75rem; font-weight: 400; line-height: 1.3; }
.grid { margin: 0 0 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.8rem; text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; }
td { border-top: 1px solid var(--line); }
.word { text-align: left; }
figure { margin: 0 0 1rem; overflow: hidden; }
.picture { overflow-x: auto; background: #fff; }
.picture img { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption { padding: 0.5rem 0.9rem; color: var(--muted); font-size: 0.85rem; border-top: 1px solid var(--line); }
details { margin-bottom: 0.6rem; }
summary { cursor: pointer; padding: 0.6rem 0.9rem; font-weight: 600; }
pre { margin: 0; padding: 0.4rem 0.9rem 0.9rem; overflow-x: auto; font-size: 0.8rem; line-height: 1.45; }
"""


def page(title: str, sections: list[Section]) -> str:
    """The whole page.

    Args:
        title: of the page; this and every other text may hold any characters.
        sections: in order.
    Returns:
        HTML.
    """
    links = "".join(f'<a href="#s{i}">{_escape(s.title)}</a>' for i, s in enumerate(sections))
    body = "\n".join(_section(f"s{i}", section) for i, section in enumerate(sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_escape(title)}</h1>\n<nav>{links}</nav>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(anchor: str, section: Section) -> str:
    parts = [f'<section id="{anchor}">\n<h2>{_escape(section.title)}</h2>']
    if section.note:
        parts.append(f"<p>{_escape(section.note)}</p>")
    if section.facts:
        parts.append(f'<dl class="facts">{"".join(map(_fact, section.facts))}</dl>')
    parts += [_grid(grid) for grid in section.grids]
    parts += [_figure(picture) for picture in section.pictures]
    for i, (title, text) in enumerate(section.texts):
        opened = " open" if i == 0 else ""
        parts.append(f"<details{opened}><summary>{_escape(title)}</summary><pre>{_escape(text)}</pre></details>")
    parts.append("</section>")
    return "\n".join(parts)


def _fact(fact: Fact) -> str:
    note = f"<small>{_escape(fact.note)}</small>" if fact.note else ""
    return f"<div><dt>{_escape(fact.label)}</dt><dd>{_escape(fact.value)}{note}</dd></div>"


def _grid(grid: Grid) -> str:
    def line(tag: str, cells: Sequence[str], row: int | None = None) -> str:
        parts = []
        for i, cell in enumerate(cells):
            kind = ' class="word"' if i < grid.left else ""
            text = _escape(cell)
            parts.append(f"<{tag}{kind}>{f'<b>{text}</b>' if (row, i) in grid.strong else text}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(line("td", cells, row) for row, cells in enumerate(grid.rows))
    return f'<div class="grid"><table><thead>{line("th", grid.heading)}</thead><tbody>\n{body}\n</tbody></table></div>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.image).decode("ascii")
    image = f'<img src="data:image/png;base64,{data}" alt="{_escape(picture.alternative)}">'
    return f'<figure><div class="picture">{image}</div><figcaption>{_escape(picture.caption)}</figcaption></figure>'


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
