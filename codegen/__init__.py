"""From a plan to source text, from source to a module, from a module to torch ops."""
