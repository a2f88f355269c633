"""A tensor of a workspace: what kernels need besides operands and results.

One record says what a buffer is, in names of a call: `batches`, `heads`, `q_len` and what else the vocabulary of a
launch has (codegen/launch/binding.py). From it codegen/launch/buffers.py makes the tensor of a call, and the text that
allocates it on the direct way; as text it is a line that people read.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER, ALWAYS = "False", "True"


@dataclass(frozen=True)
class Buffer:
    """A contiguous tensor.

    >>> print(Buffer("delta", ("batches", "heads", "padded_len")))
    delta: float32 [batches, heads, padded_len]
    >>> print(Buffer("joins", ("2 * batches + 1",), "int32", ALWAYS, "n_parts > 1"))
    joins: int32 [2 * batches + 1], zeros, if n_parts > 1
    """

    name: str  # that kernels have for it
    shape: tuple[str, ...]  # sizes, as expressions over names of a call
    dtype: str = "float32"  # torch's name, or the expression of another tensor's
    fill: str = NEVER  # a condition: where it begins as zeros
    when: str = ALWAYS  # a condition: where kernels use it; elsewhere it takes next to no memory
    pitch: str = ""  # elements from a row to the next, where that is more than a row has

    def __str__(self) -> str:
        zeros = {NEVER: "", ALWAYS: ", zeros"}.get(self.fill, f", zeros if {self.fill}")
        rows = f", rows of {self.pitch}" if self.pitch else ""
        when = "" if self.when == ALWAYS else f", if {self.when}"
        return f"{self.name}: {self.dtype} [{', '.join(self.shape)}]{rows}{zeros}{when}"
