"""Which kernel computes attention: raymm's, or FlexAttention where it is faster."""
