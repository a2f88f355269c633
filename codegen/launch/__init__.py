"""How generated kernels are launched on a GPU, or in Triton's interpreter.

One class launches, `KernelLauncher`. It is composed of parts, and each part gives to every call what its concern needs:

    part          buffers                     rows of the vocabulary      kernels that it launches
    own           of the target's kernels     sizes of their grids        the target's own
    Measures      lists and ranges of tiles   slots and rooms of lists    what lists and measures tiles
    Sums          sums that are listed        distances of tables         tables, and what sums pairs and diagonals
    Division      -                           into how many parts         -
    Descriptors   -                           a box for each descriptor   -

`own` is an `OwnPart` of a target. Parts share a `Job`, which is what does not change with calls, and know nothing of
the launcher. `own` knows `Division` where there is one. `Sums` asks `own` where its kernels leave sums. Each kernel
belongs to one part, which alone gives it the constants that kernels do not have in common.

    job.py          Job, Mode (what of a call's tensors code depends on), Part, KernelLaunch
    device.py       Device: all that is asked of a machine; another one in its place compiles ahead, or writes down
    launcher.py     KernelLauncher: the longer way of a call, which any call can take
    fast/           the ways that a call tries before: one generated function, and calls that are like one before
    buffers.py      the tensors of a workspace from their records (planning/buffer.py): as places, and as text
    binding.py      from names to arguments: the vocabulary, and generated functions
    measures.py sums.py division.py descriptors.py     the parts
    finish.py adding.py     how sums become gradients: on the direct way, and by torch
    launching.py starting.py                            what of Triton's runtime is used
    fixed.py appending.py quantizing.py summing.py      kernels that are the same for every variant
    shared.py       two modules for one call: long sequences, then short ones
    runs.py         sequences of equal lengths, on a CPU

A buffer is written once, over names of a call: `Buffer("delta", ("batches", "heads", "padded_len"))`. The longer way
evaluates its shape and makes a tensor; the direct way prints the same shape into its text; its `str` is a line for
people. So a new buffer is one record, in `buffers` of the part whose kernels use it.
"""
