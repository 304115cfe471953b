"""Choice of the attention kernel: raymm's, or FlexAttention where it is faster."""
