"""The gate of a change that must not change generated code: `make same`."""
