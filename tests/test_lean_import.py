"""Importing is cheap and harmless: no optional package, no device, no file written.

Each import runs in a process of its own, since this one has loaded everything already.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
MODULES = (
    "config",
    "planning.hardware",
    "planning.costs",
    "planning.devices",
    "planning.rates",
    "training.logs",
    "ops.deformable_attention",
    "models.dit",
    "diffusion.objectives",
    "streaming",
)
OPTIONAL = ("av", "diffusers", "transformers", "tensorboard", "matplotlib", "sklearn", "wandb")


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after a statement, in a fresh interpreter."""
    code = (
        f"import json, sys\n{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_command_line_loads_neither_torch_nor_the_optional_packages() -> None:
    loaded = loaded_by("import megaslide.cli")
    assert not loaded & {"torch", "numpy", "pydantic", *OPTIONAL}


def test_package_loads_no_optional_package() -> None:
    assert not loaded_by("import megaslide") & set(OPTIONAL)


def test_modules_load_no_optional_package_and_start_nothing() -> None:
    modules = ", ".join(f"megaslide.{name}" for name in MODULES)
    statement = (
        f"import threading, torch, {modules}\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    assert not loaded_by(statement) & set(OPTIONAL)


def test_no_start_pays_for_the_compiler() -> None:
    code = (
        "import sys, megaslide.streaming, megaslide.models.dit\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE)}, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
