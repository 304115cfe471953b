"""What processes do together on tensors: exchanges, gathers, tensor-parallel operators."""
