"""How much memory it takes to read a pretrained transformer's files into the store.

    python benchmarks/bench_loading.py [--layers N] [--folder DIR] [--json FILE]

A transformer of Wan's shape (1.3B's width; the default depth makes it 1.05e9 parameters) is written
to disk in bf16 with random weights, in shards. A process of its own then builds it, makes the store
and loads it, as `megaslide.stream` and `load` do, and reports the most that was resident. The limit
is the state and two blocks, beside what the interpreter and its libraries had before. All pages of
the state are touched before loading: memory that was never written is not resident, and would hide
a loader that takes more than it should. What the device holds, which where the device is the CPU is
in the same RAM, is no part of this. First, a gate: a small model of the same class must come out of
the store as safetensors' own reader has it, bit for bit; of the large one every SAMPLED-th tensor
must.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from megaslide.models.pretrained import Source, build_on_meta, find_source
from megaslide.planning.hardware import probe
from megaslide.streaming.checkpoint import load_weights
from megaslide.streaming.layout import UnitLayout, find_blocks, plan_units
from megaslide.streaming.store import Store, StoreSettings, plan_store
from megaslide.weights import TensorSpec, WeightFiles, write_config, write_weights

CLASS = "WanTransformer3DModel"
HEADS, HEAD_DIM, FFN, LAYERS = 12, 128, 8960, 22
SMALL = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 3}
SHARD_BYTES = 5 * 10**8
SAMPLED = 16
SPARE_BYTES = 2 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--state-format", choices=("master", "split", "split8"), default="split")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=Path("bench_loading.json"))
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(measure(options.load, options.state_format)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        require_same(Path(folder) / "small")
        result = run(Path(folder) / "large", options)
    result["machine"] = probe().provenance()
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=2))


def run(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the model, load it in a process of its own, and compare with the limit."""
    config = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "ffn_dim": FFN}
    file_bytes = write_model(root, {**config, "num_layers": options.layers})
    command = [sys.executable, __file__, "--load", str(root), "--state-format"]
    loaded = subprocess.run([*command, options.state_format], capture_output=True, text=True)
    if loaded.returncode:
        raise SystemExit(loaded.stderr)
    result: dict[str, Any] = json.loads(loaded.stdout)
    result |= {"file_bytes": file_bytes, "shards": len(list(root.glob("transformer/*-of-*")))}
    limit = result["state_bytes"] + 2 * result["block_bytes"] + result["baseline_rss_bytes"]
    return result | {
        "limit_bytes": limit,
        "peak_over_limit": result["peak_rss_bytes"] / limit,
        # The same where state and baseline, most of the limit, cannot hide it: 2 are allowed.
        "blocks_beside_state": 2 + (result["peak_rss_bytes"] - limit) / result["block_bytes"],
    }


def measure(root: Path, state_format: Any) -> dict[str, Any]:
    """In this process: the memory before the store is made, and the most until it is loaded."""
    source = find_source(str(root))
    units = units_of(source)
    baseline = resident_peak()
    settings = StoreSettings(state_format=state_format)
    require_memory(plan_store(units, settings).ram_bytes)
    store = Store(units, settings)
    for kind, arena in store.arenas.items():
        if kind != "gradients":
            arena.fill_(0)
    start = time.perf_counter()
    load_weights(store, source.folder)
    seconds, peak = time.perf_counter() - start, resident_peak()
    return {
        "params": sum(p.numel for unit in units for p in unit.parameters),
        "state_format": state_format,
        "state_bytes": store.state_bytes,
        "block_bytes": max(unit.weight_nbytes for unit in units[1:]),
        "baseline_rss_bytes": baseline,
        "peak_rss_bytes": peak,
        "load_s": seconds,
        "tensors_compared": require_equal(store, source, SAMPLED),
    }


def units_of(source: Source) -> list[UnitLayout]:
    model = build_on_meta(source, torch.bfloat16)
    resident, blocks = plan_units(model, find_blocks(model))
    return [unit.layout for unit in (resident, *blocks)]


def require_same(root: Path) -> None:
    """Stop unless a small model of the class is, in the store, what its files say."""
    write_model(root, SMALL)
    source = find_source(str(root))
    store = Store(units_of(source))
    load_weights(store, source.folder)
    require_equal(store, source, 1)


def require_equal(store: Store, source: Source, every: int) -> int:
    """Compare every so many tensors of the store with the files; how many were compared."""
    files, compared = WeightFiles(source.folder).files, 0
    for number, (name, weight) in enumerate(store.named_weights()):
        if number % every == 0:
            expected = load_file(files[name])[name]
            if weight.dtype != expected.dtype or not torch.equal(weight, expected):
                raise SystemExit(f"gate failed: {name} is not what {files[name]} holds")
            compared += 1
    return compared


def write_model(root: Path, sizes: dict[str, Any]) -> int:
    """Random weights in the dtypes of diffusers, one tensor in memory at a time; their bytes."""
    folder = root / "transformer"
    write_config(folder, CLASS, sizes)
    model = build_on_meta(
        Source(folder=folder, config={"_class_name": CLASS, **sizes}), torch.bfloat16
    )
    specs = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in specs.items():
            yield name, torch.randn(spec.shape, dtype=spec.dtype, generator=generator)

    write_weights(folder, specs, tensors(), SHARD_BYTES)
    return sum(spec.nbytes for spec in specs.values())


def require_memory(state_bytes: int) -> None:
    available = psutil.virtual_memory().available
    if available < state_bytes + SPARE_BYTES:
        raise SystemExit(
            f"{available / 1e9:.1f} GB of RAM are available, the state with its gradients has "
            f"{state_bytes / 1e9:.1f} GB: take fewer --layers, or --state-format split8"
        )


def resident_peak() -> int:
    """The most this process had so far, in bytes. (getrusage would count its parent's, too.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no memory: this benchmark needs Linux")


if __name__ == "__main__":
    main()
