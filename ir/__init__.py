"""The language: expressions, the Attention variant, its verifier, printer and reference evaluator."""
