"""The fast ways of a call: what a repeated call takes in place of the longer way, which any call can take.

A call tries these from the top; each falls back on the one below where it does not serve that call, with nothing done:

    known      one like the call before            repeating.py: nothing is computed that sizes and strides settle
    growing    one that differs in its keys alone   the same, with the number of keys left open
    direct     one whose operands fit               direct.py: one generated function from a call to its results
    longer     any                                  `__call__` of the launcher

ways.py has the one interface, which every launcher has as `fast`: `Ways`. repeats.py says when to look closely at a
call, so that later ones are known. on_cpu.py has the ways of target `cpu`, where a short call is one torch operation.
"""
