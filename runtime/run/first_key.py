"""Queries before the first key: where a call gives no q_offset, the last query stands at the last key.

With more queries than keys the first ones then have negative positions. A mask by position hides every key from them,
in silence, where torch's SDPA and FlexAttention count queries from the first key.
"""

from __future__ import annotations

from torch import Tensor

from ...ir.attention import Attention
from ...ir.caller import warn
from ...ir.errors import WeftError, counted
from ...ir.walk import symbols
from ..call import Lengths, Paged, Ragged
from ..settings import checks_values


class FirstKey:
    """What one variant says of such calls: a warning, once, and an error where values are checked."""

    def __init__(self, attention: Attention) -> None:
        self._name = str(attention.name)
        self.matters = "q_pos" in symbols(attention.canonical.folded_mask) | symbols(attention.canonical.folded_score)
        self._was_said = False

    def note(self, q_len: int, kv_len: int) -> str | None:
        """What there is to say of a dense call without a q_offset; None where nothing is."""
        if not self.matters or not 0 < kv_len < q_len:
            return None
        offset = kv_len - q_len
        return _text(f"query has {q_len} rows and key {kv_len}", str(offset), f"q_offset={offset}")

    def dense(self, q_len: int, kv_len: int) -> None:
        """Say it of a call."""
        if (text := self.note(q_len, kv_len)) is not None:
            self._say(text)

    def traced(self) -> None:
        """The same of a call in a graph, whose sizes may be symbols."""
        self._say(_text("query has more rows than key", "kv_len - q_len", "q_offset=key.shape[2] - query.shape[2]"))

    def ragged(self, sequences: Ragged, query: Tensor, key: Tensor) -> None:
        """The same of sequences whose lengths lie on the host, or whose values are checked."""
        if not self.matters or sequences.q_offset is not None:
            return
        looks = checks_values()
        if not looks and (self._was_said or not sequences.on_host):
            return
        for r in sequences.rows(query, key):
            if r.q_len > r.kv_len > 0:
                found = f"sequence {r.number} has {r.q_len} queries and {counted(r.kv_len, 'key')}"
                padded = isinstance(sequences, (Lengths, Paged)) and sequences.q_lens is None
                text = _text(found, str(r.q_offset), "the offset of each sequence")
                self._say(f"{text}; pass q_lens= too where queries are padded" if padded else text)
                return

    def _say(self, text: str) -> None:
        text = f"{self._name}: {text}"
        if checks_values():
            raise WeftError(text)
        if not self._was_said:
            self._was_said = True
            warn(text, UserWarning)


def _text(found: str, offset: str, meant: str) -> str:
    return (
        f"q_offset: {found}: where none is given the last query stands at the last key, so that the first query has "
        f"position {offset}, before the first key; pass q_offset=0 to count queries from the first key, as SDPA and "
        f"FlexAttention of torch do, or {meant} where this is meant"
    )
