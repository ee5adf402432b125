"""Commands that the documents show, as a reader would copy them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "cookbook").glob("*.md")]
)


@dataclass(frozen=True)
class Command:
    """One command of a fenced block."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.words)[:60]}"


def commands(document: Path) -> list[Command]:
    """All commands of a document's ```bash blocks; comments and continuation lines resolved."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(Command(str(document.relative_to(ROOT)), tuple(words)))
    return found
