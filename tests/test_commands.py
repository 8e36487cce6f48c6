"""Every command that README, docs and experiment files show is run here, training ones for two steps."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from launch.configure import load_config

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ["--gin.TrainConfig.steps=2", "--gin.TrainConfig.checkpoint_every=1", "--gin.DataConfig.heldout_max_bytes=2000"]
# What is not here or never trained so far, and what stands for it.
STAND_INS = {"Kimi-K3": "tests/fixtures/kimi_k3_tiny", "checkpoints/20": "checkpoints/1"}


def shown_commands() -> list[tuple[str, str]]:
    """(page, command) of each line of each ```bash block, continuation lines joined."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    found.append((page.name, line.strip()))
    return found


def shown_in_experiments() -> list[tuple[str, str]]:
    """(file, command) of the k3 commands in the opening comment of each gin file."""
    found = []
    for file in sorted((ROOT / "experiments").glob("*.gin")):
        opening = re.match(r"(#.*\n)+", file.read_text())[0]
        for line in opening.splitlines():
            command = re.match(r"#\s+(k3 [^(]*)", line)
            if command:
                found.append((file.name, command[1].strip()))
    return found


def test_commands_are_of_known_kinds():
    commands = shown_commands()
    assert {"make quickstart", "make test"} <= {c for _, c in commands}
    assert {c.split()[0] for _, c in commands} <= {"make", "k3"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {c.split()[1] for _, c in commands if c.startswith("make")} <= targets
    assert len(shown_in_experiments()) >= 3


def test_pages_are_whole():
    """No placeholder is left, and what a page links to is there."""
    for page in PAGES:
        text = page.read_text()
        assert "@@" not in text, page
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_gin_shown_is_read(tmp_path):
    shutil.copytree(ROOT / "experiments", tmp_path, dirs_exist_ok=True)
    for page in PAGES:
        for number, text in enumerate(re.findall(r"```gin\n(.*?)```", page.read_text(), re.S)):
            (tmp_path / f"{page.stem}-{number}.gin").write_text(text)
            load_config([str(tmp_path / f"{page.stem}-{number}.gin")])
    data = load_config([str(tmp_path / "README-0.gin")]).config.data
    assert (data.source, data.text_field, data.seq_len) == ("files", "body", 512)


@pytest.mark.slow
def test_commands_run(tmp_path):
    """In the order shown, in a folder of their own; `make quickstart` stands for its three commands."""
    for folder in ("experiments", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    quickstart = "k3 train --gin_file=experiments/quickstart.gin --workdir=runs/quickstart"
    done = set()
    for page, command in [("Makefile", quickstart), *shown_commands(), *shown_in_experiments()]:
        words = shlex.split(command, comments=True)
        for there, here in STAND_INS.items():
            words = [word.replace(there, here) for word in words]
        if words[0] == "make" or command in done:
            continue
        done.add(command)
        if "kimi" in command and words[1] == "train":
            continue  # needs a pod
        words = [sys.executable, "-m", "launch", *words[1:]]
        if words[3] in ("train", "sweep") and any(w.startswith("--gin_file") for w in words):
            words += SHORT
        if words[3] == "bench":
            words += ["--repeats=1", "--gigabytes=0.02", *SHORT, "--gin.DataConfig.seq_len=64"]
        if words[3] == "generate":
            words = [*(w for w in words if not w.startswith("--max_tokens")), "--max_tokens=3"]
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, f"{page}: {command}\n{ran.stdout}\n{ran.stderr}"
        assert ran.stdout.strip(), f"{page}: {command} printed nothing"
