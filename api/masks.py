"""Ready masks."""

from .ir.expr import symbol

causal = symbol("kv_pos") <= symbol("q_pos")
