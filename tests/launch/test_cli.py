"""The `k3` command from outside: help, exit codes, one-line errors, and what stays unimported."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from launch.__main__ import VERBS, available_verbs, main

ROOT = pathlib.Path(__file__).parents[2]
HEAVY = {"jax", "flax", "grain", "orbax", "optax", "tensorflow"}


def k3(*arguments: str, program: str = "") -> subprocess.CompletedProcess:
    """Runs `k3` in a process of its own, or `program` with the same arguments."""
    start = ["-c", program] if program else ["-m", "launch"]
    return subprocess.run([sys.executable, *start, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


REPORT_IMPORTS = f"""
import sys
from launch.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
print("imported:", sorted(set(sys.modules) & {HEAVY}))
sys.exit(status)
"""


def test_help_lists_exactly_the_verbs_that_exist_and_is_quick():
    start = time.perf_counter()
    result = k3("--help")
    assert time.perf_counter() - start < 2  # 0.1 s on an idle machine
    assert result.returncode == 0
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")}
    assert listed == set(available_verbs())
    there = {verb for verb, (module, _) in VERBS.items() if (ROOT / f"{module.replace('.', '/')}.py").exists()}
    assert listed == there
    assert "imported: []" in k3("--help", program=REPORT_IMPORTS).stdout


@pytest.mark.parametrize("verb", sorted(available_verbs()))
def test_a_verbs_help_shows_an_example_without_importing_jax(verb):
    result = k3(verb, "--help", program=REPORT_IMPORTS)
    assert result.returncode == 0, result.stderr
    assert f"example:\n  k3 {verb}" in result.stdout
    assert "imported: []" in result.stdout, f"launch/{verb}.py: import jax inside of run(), not at the top"


@pytest.mark.parametrize("verb", [v for v in ("config", "train") if v in available_verbs()])
def test_a_mistake_is_one_line_and_costs_no_jax_import(verb):
    result = k3(verb, "--gin.ModelConfig.num_layers=2.5", program=REPORT_IMPORTS)
    assert result.returncode == 2
    assert result.stderr == (f"k3 {verb}: error: command line: ModelConfig.num_layers = 2.5: expected an integer\n")
    assert result.stdout == "imported: []\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "k3: error: no verb 'trian'; did you mean"),
        (["zzz"], "k3: error: no verb 'zzz'; see k3 --help"),
        (["config", "--gin_flie=x"], "k3 config: error: unrecognized arguments: --gin_flie=x; did you mean --gin_fil"),
        (["config", "--gin.TrainConfig.steps", "4"], "k3 config: error: --gin.TrainConfig.steps: write the value"),
        (["config", "--gin_file"], "k3 config: error: argument --gin_file: expected one argument; see k3 config"),
        (["config", "--gin_fil=x"], "k3 config: error: unrecognized arguments"),
        (["config", "--gin_file=x.gin"], "k3 config: error: x.gin: no such gin file"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(capsys, arguments, line):
    if arguments[0] == "trian" and "train" not in available_verbs():
        pytest.skip("no verb is near")
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)


def test_no_arguments_print_the_help(capsys):
    assert main([]) == main(["--help"]) == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second


@pytest.fixture
def main_running(monkeypatch):
    """Runs `k3 config` with a body in place of its own, which stands in launch/config.py as far as one can tell."""

    def run_body(body: str) -> int:
        scope = {"__name__": "launch.config"}
        exec(f"def run(args):\n    {body}", scope)
        monkeypatch.setattr("launch.config.run", scope["run"])
        return main(["config"])

    return run_body


def test_interrupts_are_quiet_and_users_mistakes_lines_of_ours(main_running, capsys):
    assert main_running("raise KeyboardInterrupt") == 130
    assert capsys.readouterr().err == ""
    assert main_running("from k3jax.errors import UserError; raise UserError('give another value')") == 2
    assert capsys.readouterr().err == "k3 config: error: give another value\n"
    refused = "from k3jax.train.run_dir import RunRefused; raise RunRefused('differs in:\\n  steps: 1 -> 2')"
    assert main_running(refused) == 2
    assert capsys.readouterr().err == "k3 config: error: differs in:\n  steps: 1 -> 2\n"


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("raise KeyError('a bug')", KeyError, "a bug"),
        ("raise ValueError('of a shape that does not fit')", ValueError, "does not fit"),
        ("int('a bug')", ValueError, "invalid literal"),
        ("import json; json.loads('')", ValueError, "Expecting value"),
    ],
)
def test_bugs_keep_their_traceback(main_running, body, error, text):
    with pytest.raises(error, match=text):
        main_running(body)


def test_config_of_kimi_k3(capsys):
    assert main(["config", "--gin_file", str(ROOT / "experiments/kimi_k3.gin")]) == 0
    out = capsys.readouterr().out
    assert "Total parameters   2.7795T\n" in out
    assert "Active parameters  104.19B a token" in out
    assert "ModelConfig.num_layers = 93\n" in out
    assert "443,740,384" in out


def test_config_of_kimi_linear_as_json(capsys):
    assert main(["config", f"--gin_file={ROOT}/experiments/kimi_linear_48b.gin", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert f"{summary['parameters']['total']:.3e}" == "4.912e+10"
    assert f"{summary['parameters']['active']:.2e}" == "3.11e+09"
    assert f"{summary['parameters']['active_without_head']:.2e}" == "2.73e+09"
    assert summary["global_layers"] == [4, 8, 12, 16, 20, 24, 27]
    assert summary["config"]["model"]["num_experts"] == 256


def test_config_without_a_file_names_the_experiments(capsys):
    assert main(["config", "--gin.ModelConfig.num_layers=4"]) == 0
    out, err = capsys.readouterr()
    assert "ModelConfig.num_layers = 4  # default 93\n" in out
    assert "kimi_linear_48b.gin" in err and err.count("\n") == 1


def test_printed_configuration_is_a_gin_file_that_gives_it_back(tmp_path, capsys):
    change = [
        "--gin.ModelConfig.kda_per_mla=None",
        "--gin.OptimConfig.name=adamw",
        "--gin_bindings=TrainConfig.steps=7",
    ]
    assert main(["config", *change, "--print_config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "config.gin").write_text(text)
    assert main(["config", f"--gin_file={tmp_path / 'config.gin'}", "--print_config"]) == 0
    assert capsys.readouterr().out == text
    assert "ModelConfig.kda_per_mla = None  # default 3\n" in text


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "launch", "config", "--print_config"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(timeout=60)
