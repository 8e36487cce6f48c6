"""Who may import whom, read from the source; and files that stay short enough to read."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = [folder for folder in ("k3jax", "pallas_kernels", "launch") if (ROOT / folder).is_dir()]
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MAX_LINES = 400

# What a folder must not import: the folders that are built on it.
ABOVE = {
    "k3jax/ops": "config nn models train data parallel checkpoint infer study",
    "k3jax/nn": "models train data checkpoint infer study",
    "k3jax/parallel": "models train data checkpoint infer study",
    "k3jax/models": "train data checkpoint infer study",
    "k3jax/data": "nn models train checkpoint infer study",
    "k3jax/checkpoint": "train data infer study",
    "k3jax/train": "infer study",
    "k3jax/infer": "train data study",
}
ARRAYS_ONLY = {"jax", "numpy"}


def name_of(file: pathlib.Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports_of(source: str) -> set[str]:
    """Dotted names of every module a source may import, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(name: str, imported: set[str]) -> list[str]:
    """The rules that a file breaks by what it imports."""
    tops = {module.partition(".")[0] for module in imported}
    third_party = tops - set(sys.stdlib_module_names) - {"k3jax", "pallas_kernels", "launch"}
    own = {module.split(".")[1] for module in imported if module.startswith("k3jax.")}
    broken = []
    if name.startswith(("k3jax/ops/", "pallas_kernels/")) and third_party - ARRAYS_ONLY:
        broken.append(f"ops and kernels know arrays only, not {sorted(third_party - ARRAYS_ONLY)}")
    if name.startswith("pallas_kernels/") and "k3jax" in tops:
        broken.append("pallas_kernels works without k3jax")
    if "gin" in tops and not (name == "k3jax/config.py" or name.startswith("launch/")):
        broken.append("only k3jax/config.py and launch/ know gin")
    if "launch" in tops and not name.startswith("launch/"):
        broken.append("nothing imports launch")
    for folder, above in ABOVE.items():
        if name.startswith(folder + "/") and own & set(above.split()):
            broken.append(f"{folder} lies below {sorted(own & set(above.split()))}")
    if name in ("k3jax/config.py", "k3jax/config_checks.py", "k3jax/config_text.py") and third_party - {"gin"}:
        broken.append(f"a configuration is read before {sorted(third_party)} is imported")
    return broken


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_imports_only_what_lies_below_it(file):
    assert violations(name_of(file), imports_of(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_is_short_enough_to_read(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split it by idea"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("k3jax/ops/a.py", "import flax.linen as nn"),
        ("k3jax/ops/a.py", "from k3jax.config import ModelConfig"),
        ("k3jax/ops/a.py", "from k3jax import nn"),
        ("k3jax/nn/a.py", "def f():\n    import k3jax.models.kimi_k3"),
        ("k3jax/models/a.py", "from k3jax.train import loop"),
        ("k3jax/checkpoint/a.py", "from k3jax.train.run_dir import RunDir"),
        ("k3jax/checkpoint/a.py", "import k3jax.data.pipeline"),
        ("k3jax/train/a.py", "import gin"),
        ("k3jax/train/a.py", "from launch import configure"),
        ("pallas_kernels/a.py", "import k3jax.ops"),
        ("pallas_kernels/a.py", "import grain"),
        ("k3jax/config.py", "import jax"),
    ],
)
def test_the_rules_see_a_violation(name, source):
    assert violations(name, imports_of(source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("k3jax/ops/a.py", "import functools\nimport jax.numpy as jnp\nfrom k3jax.ops.norms import rms_norm"),
        ("k3jax/config.py", "import gin"),
        ("launch/a.py", "import gin\nfrom k3jax.train import loop"),
        ("k3jax/infer/a.py", "from k3jax.models import KimiK3"),
    ],
)
def test_the_rules_allow_what_they_should(name, source):
    assert violations(name, imports_of(source)) == []
