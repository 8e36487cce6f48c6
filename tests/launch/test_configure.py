"""Gin files and bindings: what they give, and the one line that each mistake gives."""

import pathlib

import pytest

from k3jax.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from k3jax.config_text import config_to_gin
from launch.configure import expand_gin_flags, load_config

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a gin file in an empty working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "a.gin") -> str:
        pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(name).write_text(text, encoding="utf-8")
        return name

    return write_file


def message(gin_files=(), bindings=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(gin_files, bindings)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_nothing_bound_is_every_default():
    config = load_config().config
    assert config == Config(ModelConfig(), DataConfig(), OptimConfig(), MeshConfig(), TrainConfig())


def test_values_of_every_kind(write):
    file = write(
        "ModelConfig.mla_layers = (4, 8)\nModelConfig.num_layers = 8\nModelConfig.q_lora_rank = None\n"
        "DataConfig:\n  source = 'files'\n  paths = ['a', 'b']\n  seq_len = 2_048\n"
        "OptimConfig.learning_rate = 3e-4\nModelConfig.kda_decay_lower_bound = -4  # a comment\n"
        "ModelConfig.kda_allow_neg_eigval = True\nMeshConfig.data = -1\n"
    )
    config = load_config([file]).config
    assert config.model.mla_layers == (4, 8)
    assert config.model.q_lora_rank is None
    assert config.model.kda_allow_neg_eigval is True
    assert config.model.kda_decay_lower_bound == -4
    assert (config.data.source, config.data.paths, config.data.seq_len) == ("files", ("a", "b"), 2048)
    assert config.optim.learning_rate == 3e-4
    assert config.mesh.data == -1


def test_the_last_word_wins_files_then_bindings(write):
    first = write("TrainConfig.steps = 1\nTrainConfig.seed = 1\nTrainConfig.log_every = 1\n", "1.gin")
    second = write("TrainConfig.seed = 2\nTrainConfig.log_every = 2\n", "2.gin")
    train = load_config([first, second], ["TrainConfig.log_every = 3", "TrainConfig.log_every = 4"]).config.train
    assert (train.steps, train.seed, train.log_every) == (1, 2, 4)


def test_include_is_relative_to_the_file_and_its_values_can_be_changed(write):
    write("include 'base/more.gin'\nTrainConfig.steps = 5\n", "deep/base.gin")
    write("TrainConfig.steps = 6\nTrainConfig.seed = 7\n", "deep/base/more.gin")
    file = write("include 'deep/base.gin'\n")
    train = load_config([file]).config.train
    assert (train.steps, train.seed) == (5, 7)


def test_macros_take_their_last_definition(write):
    file = write(
        "width = %half\nhalf = 64\nModelConfig.hidden_size = %width\nModelConfig.mla_layers = (1, %last)\nlast = 3\n"
    )
    model = load_config([file], ["half = 32"]).config.model
    assert (model.hidden_size, model.mla_layers) == (32, (1, 3))


def test_loading_twice_leaves_nothing_behind(write):
    file = write("width = 64\nModelConfig.hidden_size = %width\n")
    assert load_config([file]) == load_config([file])
    assert load_config().config.model.hidden_size == 7168


@pytest.mark.parametrize(
    ("binding", "value"),
    [
        ("OptimConfig.name = adamw", "adamw"),
        ("OptimConfig.name='adamw'", "adamw"),
        ("ModelConfig.attn_res = none", "none"),
        ("DataConfig.tokenizer = /some/place/tok-1.json", "/some/place/tok-1.json"),
        ("DataConfig.document_token = <|bos|>", "<|bos|>"),
        ("DataConfig.tokenizer = a=b #1", "a=b #1"),
        ("ModelConfig.kda_per_mla = None", None),
        ("ModelConfig.kda_per_mla=7", 7),
    ],
)
def test_command_line_text_needs_no_quotes(binding, value):
    config = load_config((), [binding]).config
    cls, field = binding.partition("=")[0].strip().split(".")
    part = {"OptimConfig": config.optim, "ModelConfig": config.model, "DataConfig": config.data}[cls]
    assert getattr(part, field) == value


def test_gin_flags_become_bindings_in_order():
    argv = ["--gin.A.b=1", "--json", "--gin.A.b=x=y", "--gin_bindings=C.d = 2"]
    assert expand_gin_flags(argv) == ["--gin_bindings=A.b = 1", "--json", "--gin_bindings=A.b = x=y", argv[-1]]
    with pytest.raises(ConfigError, match=r"--gin.A.b=VALUE"):
        expand_gin_flags(["--gin.A.b", "7"])


@pytest.mark.parametrize(
    "config",
    [
        Config(ModelConfig(), DataConfig(), OptimConfig(), MeshConfig(), TrainConfig()),
        Config(
            ModelConfig.kimi_linear_48b(mla_layers=(4,), kda_per_mla=None, kda_conv_size=1, init_std=1 / 3),
            DataConfig(source="files", paths=("it's", 'a "b"\n', "d\\é#"), document_token="%x"),
            OptimConfig(clip_norm=None, learning_rate=1.2345678901234567e-7, adam_learning_rate=1),
            MeshConfig(data=2, fsdp=-1),
            TrainConfig(seed=2**40),
        ),
    ],
)
def test_text_of_a_configuration_gives_it_back(write, config):
    text = config_to_gin(config)
    loaded = load_config([write(text)])
    assert loaded.config == config
    assert loaded.operative == text
    assert all(f"{cls}.{field} = " in text for cls, field in [("ModelConfig", "remat"), ("TrainConfig", "seed")])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ModelConfg.num_layers = 4", ["a.gin:2", "ModelConfg.num_layers = 4", "did you mean ModelConfig?"]),
        ("ModelConfig.num_layrs = 4", ["a.gin:2", "did you mean ModelConfig.num_layers?"]),
        ("ModelConfig.steps = 4", ["a.gin:2", "did you mean TrainConfig.steps?"]),
        ("Model.steps = 4", ["a.gin:2", "ModelConfig"]),
        ("ModelConfig.num_layers = 2.5", ["a.gin:2: ModelConfig.num_layers = 2.5: expected an integer"]),
        ("ModelConfig.num_layers = 'three'", ["a.gin:2: ModelConfig.num_layers = 'three': expected an integer"]),
        ("ModelConfig.num_layers = True", ["a.gin:2", "expected an integer"]),
        ("TrainConfig.steps = 1e3", ["a.gin:2", "expected an integer", "write 1000"]),
        ("ModelConfig.mla_layers = 4", ["a.gin:2", "a tuple of integers", "write (4,)"]),
        ("ModelConfig.mla_layers = {1: 2}", ["a.gin:2", "a tuple of integers"]),
        ("ModelConfig.balancing = 'quantil'", ["a.gin:2", "'sign'", "did you mean 'quantile'?"]),
        ("OptimConfig.learning_rate = 1e999", ["a.gin:2", "finite"]),
        ("OptimConfig.learning_rate = 0", ["a.gin:2: OptimConfig.learning_rate = 0: must be positive"]),
        ("ModelConfig.hidden_size = %widht\nwidth = 4", ["a.gin:2", "%widht", "did you mean %width?"]),
        ("ModelConfig.hidden_size = %w", ["a.gin:2", "ModelConfig.hidden_size = %w", "define w = VALUE"]),
        ("width = 4", ["a.gin:2", "width = 4", "nothing uses", "%width"]),
        ("a = %b\nb = 3", ["a.gin:2", "a = %b", "nothing uses"]),
        ("num_layers = 4", ["a.gin:2", "nothing uses", "did you mean ModelConfig.num_layers?"]),
        ("a = %a\nModelConfig.hidden_size = %a", ["a.gin:2", "a = %a", "defined by itself"]),
        ("w = 2.5\nModelConfig.hidden_size = %w", ["a.gin:3", "ModelConfig.hidden_size = 2.5", "an integer"]),
        ("include 'b.gin'", ["a.gin:2: include b.gin: no such gin file; did you mean a.gin?"]),
        ("include 'a.gin'", ["a.gin", "includes itself"]),
        ("import os", ["a.gin:2: import os", "cannot import"]),
        ("from os import path as p", ["a.gin:2: from os import path as p", "cannot import"]),
        ("big/ModelConfig.num_layers = 4", ["a.gin:2: big/ModelConfig.num_layers = 4", "write ModelConfig.num_layers"]),
        ("ModelConfig.num_layers = @os.system()", ["a.gin:2", "@os.system()", "not a reference"]),
        ("ModelConfig.mla_layers = (1, @TrainConfig)", ["a.gin:2", "@TrainConfig", "not a reference"]),
        ("TrainConfig.seed = 1\nTrainConfig.seed = 2", ["a.gin:3: TrainConfig.seed = 2: already set at a.gin:2"]),
        ("OptimConfig.name = adamw", ["a.gin:2", "write OptimConfig.name = 'adamw'"]),
        ("ModelConfig.mla_layers = none", ["a.gin:2", "'none' or None"]),
        ("DataConfig.tokenizer = /a/b", ["a.gin:2", "write DataConfig.tokenizer = '/a/b'"]),
        ("DataConfig:\n  seq_len = 4\n  source = files", ["a.gin:4", "write source = 'files'"]),
        ("ModelConfig.num_layers 4", ["a.gin:2: ModelConfig.num_layers 4: not valid gin", "NAME = VALUE"]),
        ("ModelConfig.num_layers =", ["a.gin:2: ModelConfig.num_layers =: not valid gin"]),
        ("ModelConfig.mla_layers = (1,\nTrainConfig.seed = 3", ["a.gin:3", "not valid gin"]),
        ("ModelConfig.mla_layers = (1,", ["a.gin:", "not valid gin"]),
        ("OptimConfig.name = 'adamw", ["a.gin:2", "not valid gin"]),
        ("OptimConfig.name = '''adamw", ["a.gin:", "not valid gin"]),
        ("ModelConfig.num_layers = 1 + 2", ["a.gin:2", "not valid gin"]),
        ("  TrainConfig.seed = 1\n TrainConfig.steps = 1", ["a.gin:3", "not valid gin"]),
        ("\0", ["a.gin:", "not valid gin"]),
        ("DataConfig.batch_size = 3\nTrainConfig.num_microbatches = 2", ["a.gin:3", "must divide DataConfig.b"]),
        ("ModelConfig.num_experts = 16", ["a.gin:2", "num_experts_per_token = 16", "less than ModelConfig.num"]),
        ("ModelConfig.num_experts = 8", ["a.gin:2", "num_experts_per_token = 16", "not exceed ModelConfig.num"]),
        ("ModelConfig.kda_num_value_heads = 100", ["a.gin:2", "multiple of ModelConfig.kda_num_heads = 96"]),
        ("ModelConfig.mla_layers = (94,)", ["a.gin:2", "ModelConfig.num_layers = 93"]),
        ("ModelConfig.mla_layers = (2, 1)", ["a.gin:2", "ascending"]),
        ("MeshConfig.data = 1\nMeshConfig.fsdp = -1\nMeshConfig.expert = -1", ["a.gin:4", "fsdp = -1 takes all"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_one_line(write, text, parts):
    line = message([write("# first line\n" + text + "\n")])
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    ("binding", "parts"),
    [
        ("ModelConfig.num_layers = three", ["command line: ModelConfig.num_layers = 'three': expected an integer"]),
        ("ModelConfig.num_layrs = 4", ["command line", "did you mean ModelConfig.num_layers?"]),
        ("ModelConfig.num_layers", ["command line: ModelConfig.num_layers: write NAME = VALUE"]),
        ("ModelConfig.num_layers = ", ["command line", "not valid gin"]),
        ("ModelConfig.num_layers == 4", ["command line", "not valid gin"]),
        ("OptimConfig.name = 'adamw", ["command line", "not valid gin"]),
        ("OptimConfig.learning_rate = -inf", ["command line", "a finite number"]),
        ("ModelConfig.hidden_size = %w", ["command line", "%w", "no such macro"]),
        ("import os", ["command line: import os"]),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(binding, parts):
    line = message((), [binding])
    for part in parts:
        assert part in line, line


def test_a_mistake_names_the_place_that_won(write):
    first, second = write("TrainConfig.steps = 5\n", "1.gin"), write("\nTrainConfig.steps = 0\n", "2.gin")
    assert message([first, second]).startswith("2.gin:2: TrainConfig.steps = 0")
    assert message([first], ["TrainConfig.steps = 0"]).startswith("command line: TrainConfig.steps = 0")


def test_missing_and_unreadable_files(write, tmp_path):
    write("", "runs/quickstart.gin")
    assert message(["runs/quikstart.gin"]).endswith("no such gin file; did you mean runs/quickstart.gin?")
    assert "did you mean" in message(["kimi_k3.gin"])  # it lies in experiments/
    assert "cannot be read" in message(["runs"])
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in message(["binary.gin"])


def test_an_include_cycle_is_refused(write):
    write("include 'b.gin'\n", "a.gin")
    write("include 'a.gin'\n", "b.gin")
    assert "includes itself" in message(["a.gin"])


def test_a_file_included_twice_by_two_is_no_cycle(write):
    write("TrainConfig.seed = 3\n", "base.gin")
    write("include 'base.gin'\n", "1.gin")
    write("include 'base.gin'\n", "2.gin")
    assert load_config([write("include '1.gin'\ninclude '2.gin'\n")]).config.train.seed == 3


def test_released_models_have_an_experiment_each():
    assert load_config([EXPERIMENTS / "kimi_k3.gin"]).config.model == ModelConfig.kimi_k3()
    assert load_config([EXPERIMENTS / "kimi_linear_48b.gin"]).config.model == ModelConfig.kimi_linear_48b()


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.gin")), ids=lambda file: file.name)
def test_every_experiment_loads_and_opens_with_its_command(file):
    load_config([file])
    opening = file.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert f"--gin_file=experiments/{file.name}" in opening or f"make {file.stem}" in opening
