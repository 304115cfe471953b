"""A Triton kernel that writes down which multiprocessor each of its programs runs on."""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def sm_number_kernel(out):
    """out: int32, one element per program."""
    tl.store(out + tl.program_id(0), cuda.smid())
