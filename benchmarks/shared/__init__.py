"""Parts that several benchmarks share: options, processes, models, inputs and oracles."""
