"""DSpark in JAX: speculative decoding with a parallel drafter, a light sequential head and confidence-scheduled verification."""
