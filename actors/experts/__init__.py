"""Mixtures of experts: routers, the routers' loss, token counts and expert parallelism."""
