"""Rejection sampling of drafted blocks: which drafts are kept and what follows them, at the target's exact law."""

from pallas_kernels.rejection_sample.api import (
    MIN_RESIDUAL_MASS,
    DraftRows,
    Outcome,
    RecomputedRows,
    accept_prob,
    greedy_outcome,
    rejection_sample,
)

__all__ = ["MIN_RESIDUAL_MASS", "DraftRows", "Outcome", "RecomputedRows", "accept_prob", "greedy_outcome", "rejection_sample"]
