"""Operations of several processes on tensors: exchanges, gathers, tensor-parallel operators."""
