"""Pretended GPU that computes on the CPU, to run GPU steps and count host waits."""
