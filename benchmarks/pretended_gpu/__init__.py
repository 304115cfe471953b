"""A GPU that computes on the CPU, to run steps where there is none and count how often the host
would wait for one."""
