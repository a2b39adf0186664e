"""Runs one dimension of the official VBench package; executed by an interpreter that has it.

The package pins versions of numpy and transformers that exclude a modern diffusers, so it lives in
an environment of its own. This file therefore imports nothing of megaslide. An audit hook refuses
every connection and every download program: a weight file that is missing is an error here, never
a download.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "urllib.Request")
DOWNLOADERS = {"wget", "curl", "git"}


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: raises where a network address or a download program is about to be used."""
    if event in CONNECTIONS:
        local = event == "socket.connect" and isinstance(arguments[1], (str, bytes))
        if not local:  # a Unix socket's address is a path
            raise ConnectionRefusedError(f"no network here: {event} {arguments[1:]}")
    if event in ("subprocess.Popen", "os.system"):
        command = arguments[1] if event == "subprocess.Popen" else os.fsdecode(arguments[0])
        words = command.split() if isinstance(command, str) else " ".join(map(str, command)).split()
        if DOWNLOADERS & {Path(word).name for word in words}:
            raise ConnectionRefusedError(f"no downloads here: {command}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--dimension", "--videos", "--prompts", "--out", "--name"):
        parser.add_argument(name, required=True)
    asked = parser.parse_args()
    sys.addaudithook(refuse_network)
    # Python puts this file's folder first, where a vbench.py lies that is not the package.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]

    import torch
    import vbench

    info = Path(vbench.__file__).parent / "VBench_full_info.json"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vbench.VBench(device, str(info), asked.out).evaluate(
        videos_path=asked.videos,
        name=asked.name,
        prompt_list=json.loads(Path(asked.prompts).read_text(encoding="utf-8")),
        dimension_list=[asked.dimension],
        local=True,
        mode="custom_input",
    )


if __name__ == "__main__":
    main()
