"""Weft (being assembled)."""
