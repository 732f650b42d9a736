"""Kernels run in Triton's interpreter where there is no CUDA device; the variable is read when Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
