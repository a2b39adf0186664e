"""A program, not a test: 3D-DSA under Triton's interpreter against the definition in fp64.

Triton reads TRITON_INTERPRET when it is imported, hence a process of its own. Prints JSON: for each
case named, the largest error of the output and of every gradient, relative to its largest value.
For "NAME VALUE KIND", with that value in an input: of the output that does not depend on it.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from test_deformable_attention import random_case

from megaslide.ops.deformable_attention import deformable_attention, triton_launch

NAMES = ("q", "k", "v", "offsets", "extra_k", "extra_v")
SMALL = {"size": (2, 3, 5), "window": (2, 2, 3)}
CASES = {
    # 3x3x3, wider than one tile, odd sizes, head dim that needs padding
    "none": {"size": (3, 3, 9), "window": (3, 3, 3), "kind": None, "d": 5, "extra": 2},
    "shift": {**SMALL, "kind": "shift", "d": 8, "groups": 2, "spread": 1.5},
    # several heads to a group, a plane of more than one block, windows against both ends
    "shift, 3x3x3": {
        "size": (3, 4, 13), "window": (3, 3, 3), "kind": "shift", "d": 5, "extra": 2, "spread": 2.0,
    },
    "affine": {**SMALL, "kind": "affine", "d": 8, "extra": 3, "spread": 0.7},
    "affine, 3x3x3": {"size": (3, 3, 5), "window": (3, 3, 3), "kind": "affine", "heads": 1},
    "tap": {**SMALL, "kind": "tap", "d": 8, "groups": 1},
    "far outside": {**SMALL, "kind": "tap", "heads": 1, "spread": 30.0},
    "shift, far outside": {**SMALL, "kind": "shift", "heads": 1, "spread": 30.0},
    "zero shift": {**SMALL, "kind": "shift", "heads": 1, "spread": 0.0},
    "zero offsets": {**SMALL, "kind": "affine", "heads": 1, "spread": 0.0},
    "an axis of one voxel": {
        "size": (1, 4, 5), "window": (1, 3, 3), "kind": "affine", "heads": 1, "batch": 2,
    },
    "a frame at a time": {
        "size": (5, 2, 3), "window": (2, 1, 2), "kind": "shift", "heads": 1, "bound": 1,
    },
    "shift, bf16": {**SMALL, "kind": "shift", "heads": 1, "extra": 2, "dtype": torch.bfloat16},
    "bf16": {**SMALL, "kind": "affine", "heads": 1, "extra": 2, "dtype": torch.bfloat16},
    "fp16": {**SMALL, "kind": "affine", "heads": 1, "extra": 2, "dtype": torch.float16},
}  # fmt: skip


def results(case, dtype, backend):
    settings = {name: x for name, x in case.items() if name not in NAMES}
    given = {
        name: x.to(dtype if name != "offsets" or dtype == torch.float64 else torch.float32)
        .clone()
        .requires_grad_()
        for name, x in case.items()
        if name in NAMES and x is not None
    }
    out = deformable_attention(**given, **settings, backend=backend)
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    (out.double() * seed).sum().backward()
    return {"out": out.detach()} | {name: x.grad for name, x in given.items()}


def errors(options):
    torch.manual_seed(0)
    options = dict(options)
    triton_launch.REACH_BYTES = options.pop("bound", 2**30)
    dtype = options.pop("dtype", torch.float32)
    case = random_case(**options, dtype=torch.float32)
    case = {n: x.to(dtype) if n in NAMES and x is not None else x for n, x in case.items()}
    found, expected = results(case, dtype, "triton"), results(case, torch.float64, "reference")
    return {
        name: float((x.double() - expected[name]).abs().max() / expected[name].abs().max())
        for name, x in found.items()
    }


def spoiled(name, value, kind):
    """With one value at the first voxel that is no number."""
    torch.manual_seed(0)
    kind = None if kind == "none" else kind
    case = random_case((2, 3, 7), (2, 2, 3), kind, d=8, heads=1, spread=0.5, dtype=torch.float32)

    def out(value, dtype, backend):
        changed = {n: x.to(dtype) if n in NAMES and x is not None else x for n, x in case.items()}
        changed[name][0, 0, 0, 0, 0].view(-1)[-1] = value
        return deformable_attention(**changed, backend=backend)[0, ..., 0, :].double()

    numbers = (0.25, -0.5, float("nan"))  # of a voxel read with weight 0, only the last tells
    expected, other, bad = (out(x, torch.float64, "reference") for x in numbers)
    free = ((expected == other) & bad.isfinite()).all(-1)
    assert 0 < free.sum() < free.numel(), "the case shows nothing"
    found = out(float(value), torch.float32, "triton")
    return {"out": float((found - expected)[free].abs().max() / expected.abs().max())}


if __name__ == "__main__":
    found = {x: errors(CASES[x]) if x in CASES else spoiled(*x.split()) for x in sys.argv[1:]}
    print(json.dumps(found))
