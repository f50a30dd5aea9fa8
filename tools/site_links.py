"""Hooks of mkdocs for `make site`: pages from files of the repository's root, links out of docs/, charts.

CONTRIBUTING.md and CHANGELOG.md become pages, although they lie outside docs/. A link to a file that is no
page becomes its text, with the file's path after it. Charts are put into their pages, so that they have the
colours of the page, dark or light.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
# Pages of the site by the file of the repository's root that each is made of.
ROOT_PAGES: Mapping[str, str] = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
CHART = re.compile(r'<img alt="[^"]*" src="(?P<file>charts/[\w-]+\.svg)" ?/?>')
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files of the repository's root; return all files.

    files: The files below docs/.
    config: The site's configuration.
    """
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        text = relinked((REPOSITORY / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's Markdown with links that work on the site.

    markdown: The text of the page.
    page: The page; only its path is read.
    config: The site's configuration; not read.
    files: The files of the site; not read.
    """
    if page.file.src_uri in ROOT_PAGES.values():
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's HTML with charts in place of the images that name them, and bars without backslashes.

    html: The page without the theme.
    page: The page; not read.
    config: The site's configuration.
    files: The files of the site; not read.
    """

    def chart(found: re.Match[str]) -> str:
        drawn = (Path(config.docs_dir) / found["file"]).read_text(encoding="utf-8")
        return STYLE.sub("", drawn)

    return with_bars(CHART.sub(chart, html))


def with_bars(html: str) -> str:
    """Return HTML whose table cells have "|" in place of "\\|".

    GitHub needs the backslash, also within code, and does not show it. mkdocs does not need it, and shows it.

    html: The page without the theme.
    """
    return CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def relinked(text: str, source: str) -> str:
    """Return Markdown whose links lead to pages of the site, or are text.

    text: Markdown of one file.
    source: The file's path in the repository, to which its links are relative.

    Links to other sites, and within a page, stay. A link to a page under docs/, or to a file of ROOT_PAGES,
    becomes relative to the site's root or folder. Any other link becomes its text and the file's path.
    """
    folder = dirname(source)
    depth = folder.count("/")

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if not target or "://" in target:
            return found[0]
        path = normpath(join(folder, target))
        anchor = found["anchor"] or ""
        page = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page is not None:
            return f"[{found['text']}]({'../' * depth}{page}{anchor})"
        return found["text"] if path in found["text"] else f"{found['text']} (`{path}` in the repository)"

    return LINK.sub(link, text)
