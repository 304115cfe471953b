"""Whole models on Ray actors."""
