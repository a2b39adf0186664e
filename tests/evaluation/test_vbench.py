"""The official package behind its own interpreter: asked only when it can answer, never trusted.

The interpreter is a script that stands for it: it takes the same arguments and leaves a file in
the layout of the official code. The worker itself runs against a package that stands for vbench.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaslide.errors import InputError
from megaslide.evaluation import vbench, vbench_worker
from megaslide.evaluation.results import Missing
from megaslide.evaluation.vbench import WEIGHTS, Scores, measure, weight_files

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
worker, *rest = sys.argv[1:]
asked = dict(zip(rest[::2], rest[1::2]))
dimension, videos = asked["--dimension"], Path(asked["--videos"])
prompts = json.loads(Path(asked["--prompts"]).read_text())
names = sorted(os.listdir(videos))
with open({log!r}, "a") as log:
    log.write(json.dumps([dimension, worker, names, prompts, os.environ.get("HF_HUB_OFFLINE")]))
    log.write("\\n")
{body}
rows = [{{"video_path": str(videos / n), "video_results": value(i)}} for i, n in enumerate(names)]
Path(asked["--out"]).mkdir(parents=True)
out = Path(asked["--out"]) / (asked["--name"] + "_eval_results.json")
out.write_text(json.dumps({{dimension: [score, rows]}}))
"""


class Interpreter:
    """A stand-in for VBENCH_PYTHON, with clips and weights for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.clips = [folder / "clips" / f"{name}.mp4" for name in "ba"]
        (folder / "clips").mkdir()
        for clip in self.clips:
            clip.write_bytes(b"video")
        self.prompts = {clip: f"prompt of {clip.stem}" for clip in self.clips}
        self.environment = {
            "VBENCH_PYTHON": str(folder / "python"),
            "VBENCH_CACHE_DIR": str(folder / "cache"),
            "TORCH_HOME": str(folder / "torch"),
            "PATH": os.environ["PATH"],
        }
        self.says("score, value = 0.5, lambda i: [0.25, 0.75][i]")
        for dimension in WEIGHTS:
            for file in weight_files(dimension, self.environment):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()

    def says(self, body: str) -> None:
        script = FAKE.format(python=sys.executable, log=str(self.log), body=body)
        python = self.folder / "python"
        python.write_text(script)
        python.chmod(0o755)

    def asked(self) -> list[list]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def measure(self) -> dict[str, Scores | Missing]:
        return measure(self.clips, self.prompts, environment=self.environment)


@pytest.fixture
def official(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


def reason(result: Scores | Missing) -> str:
    assert isinstance(result, Missing), result
    return result.reason


def test_every_dimension_is_asked_once_and_its_results_go_to_the_right_clip(
    official: Interpreter,
) -> None:
    scores = official.measure()
    assert [row[0] for row in official.asked()] == list(WEIGHTS)
    first = official.clips[0]
    for dimension in WEIGHTS:
        found = scores[f"vbench.{dimension}"]
        assert isinstance(found, Scores)
        scale = 0.01 if dimension == "imaging_quality" else 1
        assert found.overall == 0.5
        assert found.by_clip[first] == pytest.approx(0.25 * scale)
        assert found.by_clip[official.clips[1]] == pytest.approx(0.75 * scale)
    _, worker, names, prompts, offline = official.asked()[0]
    assert Path(worker) == Path(vbench_worker.__file__)
    assert names == ["00000.mp4", "00001.mp4"]
    assert [Path(p).name for p in prompts] == names
    assert all(Path(p).is_absolute() for p in prompts)
    assert list(prompts.values()) == ["prompt of b", "prompt of a"]
    assert offline == "1"
    for dimension in vbench.PROMPT_SUITE_ONLY:
        assert "prompt suite" in reason(scores[f"vbench.{dimension}"])


@pytest.mark.parametrize("dimension", WEIGHTS)
def test_a_missing_weight_file_is_named_and_nothing_is_run(
    dimension: str, official: Interpreter
) -> None:
    for file in weight_files(dimension, official.environment):
        file.rename(file.with_suffix(".away"))
        scores = official.measure()
        assert reason(scores[f"vbench.{dimension}"]) == f"weights missing at {file}"
        assert dimension not in [row[0] for row in official.asked()]
        official.log.unlink()
        file.with_suffix(".away").rename(file)


def test_weights_are_looked_for_where_the_official_code_does(tmp_path: Path) -> None:
    files = weight_files("subject_consistency", {"HOME": "/h"})
    assert Path("/h/.cache/vbench/dino_model/dino_vitbase16_pretrain.pth") in files
    assert Path("/h/.cache/torch/hub/checkpoints/dino_vitbase16_pretrain.pth") in files
    files = weight_files("motion_smoothness", {"HOME": "/h", "VBENCH_CACHE_DIR": "/c"})
    assert files == [Path("/c/amt_model/amt-s.pth")]


def test_without_an_interpreter_nothing_is_measured(official: Interpreter) -> None:
    del official.environment["VBENCH_PYTHON"]
    for dimension in WEIGHTS:
        assert "VBENCH_PYTHON is not set" in reason(official.measure()[f"vbench.{dimension}"])
    assert not official.log.exists()
    official.environment["VBENCH_PYTHON"] = str(official.folder / "nothing")
    with pytest.raises(InputError, match="nothing: not a program"):
        official.measure()


def test_only_what_needs_prompts_misses_them(official: Interpreter) -> None:
    del official.prompts[official.clips[1]]
    scores = official.measure()
    assert "no prompt for a.mp4" in reason(scores["vbench.overall_consistency"])
    assert isinstance(scores["vbench.subject_consistency"], Scores)


def test_clips_that_the_package_does_not_read_are_named(official: Interpreter) -> None:
    official.clips.append(official.clips[0].with_suffix(".webm"))
    assert ".mp4 only, not b.webm" in reason(official.measure()["vbench.dynamic_degree"])
    assert not official.log.exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("print('tail', file=sys.stderr); sys.exit('CUDA is gone')", r"\(exit 1\): CUDA is gone"),
        ("sys.exit(3)", r"\(exit 3\): no message"),
        ("sys.exit(0)", "cannot be read: FileNotFoundError"),
        ("score, value = 'high', lambda i: 1", "cannot be read: ValueError"),
        ("score, value = 1, lambda i: None", "cannot be read: TypeError"),
        ("score, value = float('nan'), lambda i: 1", "not finite"),
        ("score, value, names = 1, lambda i: 1, names[:1]", "gave no result for a.mp4"),
        ("score, value, names = 1, lambda i: 1, ['other.mp4']", "cannot be read: KeyError"),
    ],
)
def test_a_run_that_fails_is_not_measured(body: str, why: str, official: Interpreter) -> None:
    official.says(body)
    found = official.measure()["vbench.motion_smoothness"]
    assert isinstance(found, Missing)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.reason)


# --- the worker -------------------------------------------------------------------------------


def work(tmp_path: Path, evaluate: str) -> subprocess.CompletedProcess[str]:
    """Run the worker against a package `vbench` whose `evaluate` has this body.

    A stand-in for torch makes the start quick.
    """
    package = tmp_path / "site" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import json, os, socket, subprocess\n"
        "class VBench:\n"
        "    def __init__(self, device, info, out):\n"
        "        self.given = [str(device), os.path.basename(info), out]\n"
        f"    def evaluate(self, **asked):\n        {evaluate}\n"
    )
    (tmp_path / "site" / "torch.py").write_text(
        "device = str\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"/v/00000.mp4": "a kite"}')
    options = {"--dimension": "color", "--videos": "/v", "--prompts": str(prompts)}
    options |= {"--out": str(tmp_path / "out"), "--name": "megaslide"}
    command = [
        sys.executable,
        vbench_worker.__file__,
        *(w for pair in options.items() for w in pair),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_worker_calls_the_official_interface(tmp_path: Path) -> None:
    done = work(tmp_path, "print(json.dumps([self.given, asked]))")
    assert done.returncode == 0, done.stderr
    given, asked = json.loads(done.stdout)
    assert given == ["cpu", "VBench_full_info.json", str(tmp_path / "out")]
    assert asked == {
        "videos_path": "/v",
        "name": "megaslide",
        "prompt_list": {"/v/00000.mp4": "a kite"},
        "dimension_list": ["color"],
        "local": True,
        "mode": "custom_input",
    }


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.getaddrinfo('example.org', 443)",
        "subprocess.run(['wget', 'https://example.org/weights.pth'])",
        "subprocess.run('cd /tmp && /usr/bin/curl -O x', shell=True)",
        "os.system('wget -q https://example.org/weights.pth')",
    ],
)
def test_worker_refuses_the_network(attempt: str, tmp_path: Path) -> None:
    done = work(tmp_path, attempt)
    assert done.returncode == 1
    assert "ConnectionRefusedError: no " in done.stderr


def test_worker_leaves_other_programs_and_local_sockets_alone(tmp_path: Path) -> None:
    local = "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1), flush=True)"
    done = work(tmp_path, f"subprocess.run(['echo', 'wgets']); {local}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["wgets", "b'x'"]
