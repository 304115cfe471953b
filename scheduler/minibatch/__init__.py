"""Steps and microbatches in balance, by sizes or by measured costs."""
