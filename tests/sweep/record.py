"""What the sweep found, on disk and in the docs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import transformers

from .judge import Found

RECORD = Path(__file__).parent / "record.json"


def write(results: Sequence[Found]) -> None:
    found = {r.name: [r.status, r.why] if r.why else [r.status] for r in results}
    RECORD.write_text(json.dumps({"transformers": transformers.__version__, "classes": found}, indent=0) + "\n")
