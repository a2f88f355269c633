"""Features of kernels: what adds lines of its own at hooks that templates name (templates/triton/parts/hooks.py.jinja).

One more feature is a record, a template with macros by the names of hooks, and a place in `features` of its kernels.
"""

from __future__ import annotations

from ....compiler.planning.kernel import Feature

DISTANCES = Feature("distances", "triton/features/distances.py.jinja")
SINK = Feature("sink", "triton/features/sink.py.jinja")
DROPOUT = Feature("dropout", "triton/features/dropout.py.jinja")
QUANTIZED = Feature("quantized", "triton/features/quantized.py.jinja")
OF_A_BACKWARD = (DISTANCES, DROPOUT)
# What the kernel that owns queries adds up, and the one that owns keys
SUMS_OF_QUERIES = tuple(
    Feature(name, f"triton/features/{name}.py.jinja", sums=True)
    for name in ("row_sums", "level_sums", "stored_pairs", "row_sinks")
)
SUMS_OF_KEYS = (Feature("column_sums", "triton/features/column_sums.py.jinja", sums=True),)
