"""Runnable experiments, one module per question."""
