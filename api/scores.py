"""Ready scores."""
