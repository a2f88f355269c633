"""Every class of transformers' auto mappings, tiny and random, under "weft" and under "eager"."""
