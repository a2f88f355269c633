"""What a call must satisfy. A rule stands once, as a condition and as what is said where it does not hold.

A list of problems answers yes or no, too: of a call that is sound nothing is made but an empty list.
"""

from __future__ import annotations

from torch import Tensor

from ...ir.attention import Attention
from ...ir.errors import Problem, collected
from ..call import Call, Dense, length_options
from .operands import offset_problems, operand_problems
from .sequences import sequence_problems
from .tensors import known_memory_problems, tensor_problems


def fits(call: Call) -> bool:
    """Whether tensors fit each other: what may vary between calls that share what is prepared."""
    return not (call_problems(call) or _freed(call))


def call_problems(call: Call) -> list[Problem]:
    """Tensors that do not fit each other, and lengths that do not fit these."""
    return tensor_problems(call) or row_problems(call)


def row_problems(call: Call) -> list[Problem]:
    """Positions and lengths that do not fit the main tensors."""
    query, key, sequences = call.query, call.key, call.sequences
    if isinstance(sequences, Dense):
        return offset_problems(sequences.q_offset, query.shape[0], query.device)
    return sequence_problems(query, key, sequences)


def check_call(attention: Attention, call: Call) -> None:
    """Raise WeftError where the tensors of a call do not fit, or an operand is of another kind than declared.

    The api makes these checks too, with all problems in one message; but a graph compiled or exported by torch reaches
    the op without them.
    """
    problems = [*call_problems(call), *operand_problems(attention, call.operands, call.query.device)]
    if problems := problems or _freed(call):
        raise collected(str(attention.name), problems)


def _freed(call: Call) -> list[Problem]:
    """Tensors of a call that have no memory."""
    sequences = call.sequences
    named: dict[str, object] = {**call.tensors, **call.operands}
    named |= sequences.tensors if isinstance(sequences, Dense) else length_options(sequences)
    if isinstance(sequences.q_offset, Tensor):
        named["q_offset"] = sequences.q_offset
    return known_memory_problems(named)
