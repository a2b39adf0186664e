"""Clips on disk to batches of latents: decoding, codecs, captions, the cache, and sample data.

`prepare` builds a cache from a folder of captioned clips, `LatentDataset` reads it, `BucketSampler`
orders it. The submodules are imported by name, so that using one does not import the others'
optional dependencies.
"""
