"""Target cpu: tiles of plain torch code."""
