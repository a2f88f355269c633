"""The tests keep their generated modules in the checkout, not in the cache of the user who runs them."""

import os
from pathlib import Path

os.environ.setdefault("WEFT_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-cache"))
