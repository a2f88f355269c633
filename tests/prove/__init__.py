"""Proofs about tile programs by an SMT solver (z3): for all positions, lengths, tile sizes and values of operands.

polynomials.py     sums of products of names, with what a solver must know of products
terms.py           expressions of the language as terms of the solver
programs.py        a tile program as conditions on one tile of any size
questions.py       what could be wrong, each as a condition that no values must satisfy
widths.py          in which width GPU kernels compute what, and whether it fits
kernels.py         what kernels themselves compute with numbers of tiles
solving.py         proven, unknown or refuted, within a time limit
proving.py         all questions about a mask, and their answers
counterexample.py  values that refute, confirmed in plain Python, as a script
gallery.py         the masks of the library, and random ones
mutants.py         wrong bounds that must be refuted
__main__.py        the command line: `make prove`
"""
