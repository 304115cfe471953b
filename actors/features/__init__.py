"""Features of frozen encoders that are kept: where they lie, and how items come by theirs."""
