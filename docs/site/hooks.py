"""Hooks of mkdocs: links that leave docs/ lead to copies inside of the site, so that it is whole by itself.

In the repository `[…](../examples/one_line.py)` leads to the file. In the site code becomes a page with that code,
other files are copied as they are, the README is the first page, and of folders and other texts only the name is left.
Links in the notebook and in `playground.html`, which mkdocs does not read, are made to lead to the built pages.
Ranges in tables are marked, so that the style can put them below their values.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]*)(?:#[^)\s]*)?\)")
RANGE = re.compile(r" (\([^<>() ]+–[^<>() ]+\)|\(× [\d.]+\))</td>")  # "375 (344–406)", "0.0163 (× 1.08)"
SECOND = re.compile(r" (/ [\d.–]+)</td>")  # "5.1 (3.94) / 0.688"
COPIES = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to from outside of docs/."""
    root = Path(config.docs_dir).parent
    pages = [file for file in files.documentation_pages() if file.src_uri.endswith(".md")]
    linked = {name for page in pages for _, name in LINK.findall(page.content_string)}
    for name in sorted(linked):
        if (root / name).is_file() and not name.endswith(".md"):
            files.append(_copy(name, root, config))
    return files


def _copy(name: str, root: Path, config: MkDocsConfig) -> File:
    if not name.endswith(".py"):
        return File.generated(config, f"{COPIES}/{name}", abs_src_path=str(root / name))
    code = (root / name).read_text()
    return File.generated(config, f"{COPIES}/{name}.md", content=f"# {name}\n\n```python\n{code}```\n")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Leads a page's links to the copies."""
    root = Path(config.docs_dir).parent

    def inside(link: re.Match[str]) -> str:
        text, name = link.groups()
        if name == "README.md":
            return f"[{text}](index.md)"
        if (root / name).is_dir() or name.endswith(".md"):
            return text
        return f"[{text}]({COPIES}/{name}{'.md' if name.endswith('.py') else ''})"

    return markdown if page.file.src_uri.startswith(COPIES) else LINK.sub(inside, markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Leads the notebook's links to pages; in tables a range goes below its value."""
    if page.file.src_uri.endswith(".ipynb"):
        return _to_built_pages(html)
    html = RANGE.sub(lambda end: f' <span class="range">{end[1].replace("–", "–<wbr>")}</span></td>', html)
    return SECOND.sub(r' <span class="second">\1</span></td>', html)


def on_post_build(config: MkDocsConfig) -> None:
    """Leads the playground's links to pages."""
    page = Path(config.site_dir) / "playground.html"
    text = page.read_text().replace('href="../README.md">README<', 'href="index.html">Documentation<')
    page.write_text(_to_built_pages(text))


def _to_built_pages(html: str) -> str:
    return re.sub(r'href="(\w+)\.md', r'href="\1.html', html)
