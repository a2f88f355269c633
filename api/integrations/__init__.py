"""Weft inside other libraries: `weft.integrations.transformers`. Nothing here is imported by `import weft`."""
