"""Beginning with a checkpoint: what is taken is the checkpoint's, the rest is as drawn, and both are told."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.checkpoint import hf
from k3jax.checkpoint.hf_aside import ASIDE, open_aside
from k3jax.checkpoint.hf_layout import hf_tensors, leaf_shapes
from k3jax.checkpoint.hf_source import open_released
from k3jax.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from k3jax.errors import UserError
from k3jax.models.kimi_k3 import init_variables, variable_shapes
from k3jax.train.start import keep_beside, load_start, plan_start
from tests.checkpoint.released import VISION, write_k3
from tests.train.tiny import K3_SHAPE, PLAIN


def begin(model: ModelConfig, folder, *patterns: str) -> Config:
    train = TrainConfig(init_from=str(folder), init_tensors=patterns or ("*",))
    return Config(model, DataConfig(), OptimConfig(), MeshConfig(), train)


@pytest.fixture(scope="module")
def small() -> ModelConfig:
    return ModelConfig(**K3_SHAPE)


@pytest.fixture(scope="module")
def drawn(small):
    return init_variables(small, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small, drawn) -> pathlib.Path:
    """A released checkpoint of the small model."""
    path = tmp_path_factory.mktemp("start") / "hf"
    hf.save(path, small, jax.tree.map(lambda x: x + 1, drawn), dtype="bfloat16")
    return path


def onto(mesh, config: ModelConfig):
    """Shapes with shardings: the last axis over the mesh where it divides."""

    def place(x):
        axes = (None,) * (len(x.shape) - 1) + ("a" if x.shape[-1] % mesh.size == 0 else None,)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(place, variable_shapes(config))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("base", [PLAIN, K3_SHAPE, K3_SHAPE | {"attn_res": "none", "kda_output_gate": "low_rank"}])
def test_shapes_without_jax_are_the_models(base):
    config = ModelConfig(**base)
    want = {path: x.shape for path, x in flatten_dict(variable_shapes(config)).items()}
    assert leaf_shapes(config, hf_tensors(config, "")) == want


def test_everything_is_taken(small, drawn, folder, mesh):
    start = plan_start(begin(small, folder))
    assert not start.fresh and not start.differences
    shapes = onto(mesh, small)
    got = load_start(start, shapes, None)
    want = flatten_dict(hf.load(folder)[1])
    for path, x in flatten_dict(got).items():
        assert (x.dtype, x.sharding) == ("float32", flatten_dict(shapes)[path].sharding)
        np.testing.assert_array_equal(x, np.asarray(want[path], np.float32), err_msg=str(path))
    assert "none fresh" in start.summary()


def test_a_part_is_taken_and_the_rest_is_as_drawn(small, drawn, folder, mesh):
    start = plan_start(begin(small, folder, "params/embed", "params/layer 2/*", "*/moe/expert_*"))
    got = flatten_dict(load_start(start, onto(mesh, small), init_variables(small, seed=1)))
    want = flatten_dict(hf.load(folder)[1])
    taken = {(tensor.path, tensor.index) for tensor, _ in start.taken}
    fresh = {(tensor.path, tensor.index) for tensor in start.fresh}
    assert taken and fresh and not taken & fresh
    for path, leaf in got.items():
        for index in [()] if (path, ()) in taken | fresh else list(np.ndindex(*leaf.shape[:2])):
            base = want if (path, index) in taken else flatten_dict(drawn)
            np.testing.assert_array_equal(leaf[index], np.asarray(base[path][index], np.float32), err_msg=str(path))
    record = start.record().splitlines()
    assert f"taken: {len(taken)} tensors" in record and f"fresh: {len(fresh)} tensors" in record
    assert "  params/embed" in record[: record.index(f"fresh: {len(fresh)} tensors")]
    assert "  params/layer */mixer_norm   layers 1" in record[record.index(f"fresh: {len(fresh)} tensors") :]


def test_layers_are_matched_by_number_whatever_the_stacking(small, folder):
    """A model with two layers more: the stages differ, the first two layers are the checkpoint's."""
    deeper = dataclasses.replace(small, num_layers=4)
    with pytest.raises(UserError) as caught:
        plan_start(begin(deeper, folder))
    assert "  params/layer 3/mixer_norm: not there; nearest: params/layer 2/mixer_norm" in str(caught.value)
    start = plan_start(begin(deeper, folder, "params/layer [12]/*", "router/layer [12]/*", "params/embed"))
    assert {tensor.layer for tensor, _ in start.taken} == {0, 1, 2}
    assert {tensor.layer for tensor in start.fresh} == {0, 3, 4}


def test_what_does_not_fit_is_listed(small, folder):
    wider = dataclasses.replace(small, intermediate_size=48, kda_decay="softplus")
    with pytest.raises(UserError) as caught:
        plan_start(begin(wider, folder))
    assert str(caught.value).splitlines()[1:] == [
        "  params/layer 1/mlp/gate: [32, 32] there, [32, 48] in the model",
        "  params/layer 1/mlp/up: [32, 32] there, [32, 48] in the model",
        "  params/layer 1/mlp/down: [32, 32] there, [48, 32] in the model",
    ]
    start = plan_start(begin(wider, folder, "params/layer */kda/*"))
    assert "ModelConfig.kda_decay: 'bounded' -> 'softplus'" in start.differences


def test_patterns_and_folders_that_are_not_there(small, folder, tmp_path):
    with pytest.raises(UserError, match=r"no tensor is called 'params/layer \*/kdaa/\*'; there is 'params/layer 1/kda"):
        plan_start(begin(small, folder, "*", "params/layer */kdaa/*"))
    with pytest.raises(UserError, match="nowhere"):
        plan_start(begin(small, tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"TrainConfig\.init_from = '': give a folder"):
        begin(small, "")


def test_what_lies_beside_the_model_goes_into_the_run(tmp_path):
    write_k3(tmp_path / "k3")
    config = open_released(tmp_path / "k3").config
    keep_beside(plan_start(begin(config, tmp_path / "k3")), tmp_path)
    aside = open_aside(tmp_path / ASIDE)
    assert sorted(stored.name for stored in aside.tensors) == sorted(VISION)
    assert [file.name for file in aside.files] == ["tokenizer.json"]
    keep_beside(plan_start(begin(config, tmp_path / "k3")), tmp_path)  # again, after a kill
