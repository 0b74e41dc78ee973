"""Drawing drafted tokens from logits with a low-rank Markov bias, U + W1[x] W2, in one pass over the vocabulary."""

from pallas_kernels.markov_sample.api import Draft, Filter, latent_sample, markov_block, markov_sample

__all__ = ["Draft", "Filter", "latent_sample", "markov_block", "markov_sample"]
