"""Checks and measurements that need a GPU, in one command of at most nine minutes.

``make gpu PYTHON=python3`` needs torch, transformers, triton and numpy, and installs nothing.
"""
