"""The objective a model is trained with and the sampler that generates from it, model-agnostic."""
