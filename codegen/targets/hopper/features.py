"""Features of backwards: what adds lines of its own at hooks that templates name.

Hooks are as in templates/triton/parts/hooks.py.jinja. Templates also ask features of this list for names, as of what
consumers keep. One more feature, with lines at hooks alone, is a record, a template with macros by the names of hooks,
and a place in `features` of its kernels.
"""

from __future__ import annotations

from ....compiler.planning.kernel import Feature

OF_A_BACKWARD = tuple(
    Feature(name, f"hopper/features/{part}.py.jinja")
    for name, part in (
        ("dropout", "backward_dropout"),
        ("boxed_pairs", "boxed_pairs"),
        ("stored_pairs", "stored_pairs"),
        ("sums_of_keys", "sums_of_keys"),
    )
)
SUMS_OF_QUERIES = (Feature("sums_of_queries", "hopper/features/sums_of_queries.py.jinja", sums=True),)
