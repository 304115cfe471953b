"""Triton kernel that records the multiprocessor on which each of its programs runs."""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def sm_number_kernel(out):
    """Write SM numbers to ``out``, int32, one element per program."""
    tl.store(out + tl.program_id(0), cuda.smid())
