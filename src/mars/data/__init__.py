"""Datasets: formats, chat templates, loss masks, packing, preview."""

from mars.data.collate import Collator, pack
from mars.data.dataset import BuildReport, Example, build_examples, read_records
from mars.data.files import read_prompts
from mars.data.formats import detect_format
from mars.data.preview import preview
from mars.data.prompts import PromptRecord, read_prompt_records

__all__ = [
    "BuildReport",
    "Collator",
    "Example",
    "PromptRecord",
    "build_examples",
    "detect_format",
    "pack",
    "preview",
    "read_prompt_records",
    "read_prompts",
    "read_records",
]
