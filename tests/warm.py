"""What a server of processes imports once, for all that it forks: torch, Weft, and what first calls import besides."""

import filelock
import sympy.assumptions.wrapper
import sympy.tensor.tensor
import torch._dynamo  # which FSDP, tensors over ranks and optimizers import where they are used first
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import weft.codegen.generate
import weft.codegen.templates
import weft.compiler.analysis.values.symbolic
import weft.distributed

__all__ = ["filelock", "sympy", "torch", "weft"]
