"""What a test sees of an HTML page: its tags, its texts, its tables, and its charts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from megatron_r3.cli import main

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """A parsed page. Every tag must be closed where HTML or SVG wants it.

    Attributes:
        tags: each tag with its attributes.
        text: what a reader sees, with one space between pieces.
        tables: the tables as rows of texts.
        figures: what the script gives plotly: the JSON of the element `data`.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.figures: Any = None
        self._open: list[str] = []
        self._texts: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert [tag] == self._open[-1:], f"</{tag}> in {self._open}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            if dict(self.tags[-1][1]).get("id") == "data":
                self.figures = json.loads(data)
            return
        if "style" in self._open:
            return
        self._texts.append(data)
        if {"th", "td"} & set(self._open):
            self.tables[-1][-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The cells after the first one, of the only row whose first cell is the name."""
        rows = [row for table in self.tables for row in table if row and row[0] == name]
        assert len(rows) == 1, rows
        return rows[0][1:]


def outside(text: str) -> list[str]:
    """Everything in a page that a browser might load from elsewhere."""
    page = Page(text)
    found = []
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            link = name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster")
            if link and not value.startswith(("#", "data:image/png;base64,")):
                found.append(f"{tag} {name}={value}")
        if tag in ("link", "iframe", "base", "object", "embed"):
            found.append(tag)
    urls = re.findall(r"url\(\s*['\"]?([^)'\"]*)", text)
    found += [url for url in urls if not url.startswith("#")]
    found += re.findall(r"@import[^;]*", text)
    return [*found, *re.findall(r"\b(?:https?|wss?|ftp)://[^\s\"'<)]+", text)]


def report(*runs: Path, out: Path) -> str:
    """The page of runs, which is written to `out`, without plotly.js.

    The library's 5 MB hold addresses, which the page forbids it to load.
    """
    assert main(["rl", "report", *map(str, runs), "--out", str(out)]) == 0
    library = r'(<script id="plotly">)/\*\*\n\* plotly\.js.*?(</script>)'
    text, times = re.subn(library, r"\1\2", out.read_text(), flags=re.DOTALL)
    assert times == 1
    return text


def chart(text: str, title: str) -> dict[str, Any]:
    """The figure of the first chart with a title."""
    titles = re.findall(r"<figure[^>]*><figcaption><h3>(.*?)(?:: <.*?)?</h3>", text)
    figure: dict[str, Any] = Page(text).figures[titles.index(title)]
    return figure
