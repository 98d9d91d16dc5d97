"""The records shown in docs/data.md are what the page says they are."""

import json
import re
from pathlib import Path

from mars.data.formats import FORMATS, convert, detect_format

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_documented_records_cover_every_format_in_order():
    block = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert block
    records = [json.loads(line) for line in block[1].splitlines()]
    names = [detect_format(record).name for record in records]
    assert list(dict.fromkeys(names)) == [dataset_format.name for dataset_format in FORMATS]
    for record in records:
        convert(record, detect_format(record))


def test_documented_columns():
    for dataset_format in FORMATS:
        required = ", ".join(f"`{name}`" for name in dataset_format.required)
        optional = ", ".join(f"`{name}`" for name in dataset_format.optional)
        assert f"| {dataset_format.name} | {required} | {optional}".rstrip() in PAGE
