"""Whether learned motion earns its cost: the same small model, differing in self-attention only.

    python -m benchmarks.quality [--smoke] [--out FOLDER]      (or `make ablation`)

`worlds` draws synthetic videos in latent space, `arms` lists the models, `study` trains one and
writes one JSON per run, `offsets` holds what a model learned against the true motion, `plan` says
which runs the study has, `figures` and `report` make the page from the JSONs.
"""
