"""Drawing drafted tokens from logits with a low-rank Markov bias, U + W1[x] W2, in one pass over the vocabulary."""

from pallas_kernels.markov_sample.api import Draft, Filter, latent_sample, markov_block, markov_sample
from pallas_kernels.markov_sample.int8 import with_int8_w2

__all__ = ["Draft", "Filter", "latent_sample", "markov_block", "markov_sample", "with_int8_w2"]
