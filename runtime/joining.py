"""Results over disjoint keys, joined without gradients: by a kernel on a GPU, and by torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codegen.launch.joining import Pair, joining
from ..codegen.targets import target_named
from .settings import default_target


def join_results(first: Pair, more: Pair, into: Pair) -> None:
    """Attention over all keys from that over disjoint sets of them (Dao et al. 2023, "Flash-Decoding").

    first, into: out [B, H, L, Dv], whose columns are contiguous, and statistics [1 or 2, B, H, L]; more: n such
    results, [n, B, H, L, Dv] and [n, 1 or 2, B, H, L]. Statistics are the log-sum-exp of a row, or two, where scores
    may lie far from 0: its greatest score, and the log of the sum of exp(score - greatest). into may be first, which is
    then joined in place. A row that no result has seen a key of gives 0 and -inf. Sums are in float32, or in float64.
    """
    if not first[0].numel():
        return
    if first[1].dtype == torch.float32 and (device := _of_kernel(first[0])) is not None:
        if device == -1 or device == torch.cuda.current_device():
            return joining(device, device == -1)(first, more, into)
        with torch.cuda.device(device):  # Triton launches on the current one
            return joining(device, False)(first, more, into)
    known = torch.cat([first[1][None], more[1]])
    if known.shape[1] == 2:
        lse, shares = far_lse_and_shares(known)
    else:
        lse, shares = known.logsumexp(0), _shares_of_results(known[:, 0])
    total = first[0] * shares[0, ..., None]
    for part, share in zip(more[0], shares[1:]):
        total.addcmul_(part, share[..., None])
    into[0].copy_(total)
    into[1].copy_(lse)


def _of_kernel(out: Tensor) -> int | None:
    """The device that a kernel runs on, -1 for the interpreter; None where torch joins."""
    if out.is_cuda:
        return out.get_device()
    name = default_target()
    return -1 if name is not None and target_named(name).interprets else None


def lse_and_shares(lses: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp [...] of those [n, ...] of n parts, and what each part weighs, [n, ...]; 0 where all are -inf."""
    greatest = lses.detach().amax(0)
    finite = torch.where(greatest == -torch.inf, 0.0, greatest)  # -inf less itself is no number
    weights = (lses - finite).exp()
    total = weights.sum(0)
    seen = total != 0.0  # NaN stays NaN
    lse = torch.where(seen, finite + torch.where(seen, total, 1.0).log(), -torch.inf)
    return lse, weights / torch.where(seen, total, 1.0)


def _shares_of_results(lses: Tensor) -> Tensor:
    """What each of n results of kernels weighs, [n, ...]. One whose lse is -inf is 0, and may weigh anything."""
    return lses.clamp(min=torch.finfo(lses.dtype).min).softmax(0)


def far_lse_and_shares(lses: Tensor) -> tuple[Tensor, Tensor]:
    """As lse_and_shares, of two statistics of a row, [n, 2, ...]: its greatest score, and the log of the sum of
    exp(score - greatest), each exact where their sum is not."""
    greatest = lses[:, 0].amax(0)
    finite = torch.where(greatest == -torch.inf, 0.0, greatest)
    rest, shares = lse_and_shares(lses[:, 0] - finite + lses[:, 1])
    seen = greatest != -torch.inf
    return torch.stack([greatest, torch.where(seen, rest, 0.0)]), shares
