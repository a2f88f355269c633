"""Many workers share the machine: what they compute on its CPU takes one core each."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
