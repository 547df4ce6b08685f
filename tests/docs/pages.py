"""The pages that people read, and the blocks of code in them."""

import pathlib
import re
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: what stands behind the opening ```.
        code: what is in it.
        line: on which line of the page the code begins.
    """

    language: str
    code: str
    line: int


def blocks(page, *languages):
    """The blocks of a page in some languages."""
    text = page.read_text()
    found = [Block(match[2], match[3], text.count("\n", 0, match.start(3)) + 1) for match in FENCED.finditer(text)]
    return [block for block in found if block.language in languages]


def without_code(page):
    """The text of a page, its blocks and code spans left out."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
