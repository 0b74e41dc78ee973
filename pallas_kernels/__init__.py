"""Kernels for stochastic drafting and verification. They depend on jax alone."""
