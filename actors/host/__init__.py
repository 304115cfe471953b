"""Host of a process: network interfaces, GPU driver, compilers."""
