"""From a plan to a program: list scheduling, simulation, memory, bounds."""
