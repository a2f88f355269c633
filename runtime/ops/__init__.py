"""Calls as torch sees them.

library.py      the two ops, weft::attention and weft::attention_backward: schema, implementations, autograd
dispatch.py     a call, past torch's dispatcher or through it
recorded.py     a call that autograd records and nothing else watches
transforms.py   a call under torch.func
append.py       the op weft::append_rows, of caches of keys and values
"""
