"""A fuzzer of the whole of Weft: random declarations and calls, judged by a definition that shares nothing with it.

    tree.py       the fuzzer's own expressions, and how they are written as Weft's Python
    dense.py      what they mean: a dense evaluator in torch, with its own table of operators and bounds of rounding
    declare.py    draws declarations          invoke.py    draws calls
    calls.py      calls as records, and their tensors as text that a script can hold
    sequences.py  lengths and pages           kinds.py     what a call has in it, to be counted
    expected.py   out, lse and gradients of a call, exact and plain, and how far a kernel may be off
    judge.py      makes a call of Weft and compares           shrink.py    makes a failing case small
    script.py     prints a case as a script that repeats it   mutants.py   defects planted on purpose, to be caught

Run it with `python -m tests.fuzz` (or `make fuzz`); `python -m tests.fuzz --help` lists the options.
"""
