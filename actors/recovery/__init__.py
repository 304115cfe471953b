"""Recovery of ranks after the loss of some: leave the step, replace processes and reconnect."""
