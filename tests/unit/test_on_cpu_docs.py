"""docs/cpu.md shows the table as it is."""

import re
from pathlib import Path

from megatron_anchor.on_cpu.listing import as_markdown

PAGE = Path(__file__).parents[2] / "docs" / "cpu.md"


def test_the_page_holds_the_table_of_replacements() -> None:
    shown = re.search(r"<!-- table: .*? -->\n(.*?)\n<!-- end of table -->", PAGE.read_text(), re.S)
    assert shown is not None
    assert shown[1] == as_markdown(), "paste what the command in the page's comment prints"
