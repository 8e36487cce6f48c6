"""Diagnostics against numpy on everything the model recorded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from k3jax.data import Batch
from k3jax.models import KimiK3, init_variables
from k3jax.train import diagnostics as module
from k3jax.train.balance import layer_values
from k3jax.train.diagnostics import collect_diagnostics, half_life_quantile, read_diagnostics, write_diagnostics
from k3jax.train.mesh import make_mesh, replicated

J, K, T = 2, 4, 12


def tiny(**changes) -> Config:
    """A stage that scans three blocks that scan two KDA layers, then a shorter block with MLA."""
    values = {
        "vocab_size": 19, "num_layers": 7, "hidden_size": 16, "init_std": 0.5, "mla_layers": (7,),
        "kda_num_heads": J, "kda_key_dim": K, "kda_value_dim": 4, "mla_num_heads": 2, "q_lora_rank": None,
        "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "attn_res_block_size": 2,
        "first_k_dense": 0, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 8, "moe_latent_size": 8, "dtype": "float32", "remat": "none",
        "kda_implementation": "recurrent",
    }  # fmt: skip
    return Config(ModelConfig(**(values | changes)), DataConfig(), OptimConfig(), MeshConfig(), TrainConfig())


ONE_LAYER = tiny(attn_res="none", num_layers=1, mla_layers=(), first_k_dense=1, intermediate_size=8)


def variables_of(config: Config, queries: float) -> dict:
    """Random variables, with pseudo-queries of the given size; drawn by numpy, as initialisers compile slowly."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        name, noise = path[-1].key, rng.standard_normal(x.shape)
        if name.endswith("_query"):
            return jnp.asarray(queries * noise, x.dtype)
        if name.endswith(("_gain", "_norm")):
            return jnp.asarray(1 + 0.1 * noise, x.dtype)
        return jnp.asarray(noise - 3 if name == "dt_bias" else 0.4 * noise, x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init_variables(config.model)))


def padded_batch() -> Batch:
    """Two rows of two documents and padding."""
    tokens = np.random.default_rng(0).integers(0, 19, (2, T)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 7 + [2] * 1 + [0] * 4], np.int32)
    return Batch(tokens, tokens, segments)


@functools.lru_cache
def case(form: str, queries: float):
    config, batch = tiny(attn_res=form), padded_batch()
    variables = variables_of(config, queries)
    return config, variables, batch, collect_diagnostics(config, variables, batch)


@functools.lru_cache
def recorded_by(form: str, queries: float) -> dict:
    """Everything that the model of a case records."""
    config, variables, batch, _ = case(form, queries)
    run = jax.jit(functools.partial(KimiK3(config.model).apply, mutable=["intermediates"]))
    return run(variables, batch.tokens_BT, batch.segment_ids_BT)[1]["intermediates"]


def expected_weights(config, variables, batch, recorded) -> list[np.ndarray]:
    """Mean weights of each consumer over its own sources, in their order, recomputed from the sublayers' outputs."""
    c, mask = config.model, batch.segment_ids_BT != 0

    def by_layer(*path):
        return {n: np.asarray(x, np.float64) for n, x in layer_values(c, recorded, *path).items()}

    def mean_weights(sources, query, gain):
        scores = [v / np.sqrt((v * v).mean(-1, keepdims=True) + c.rms_norm_eps) @ (query * gain) for v in sources]
        weights = np.exp(np.stack(scores, -1))
        return (weights / weights.sum(-1, keepdims=True))[mask].mean(0)

    mixer_out, ffn_out = by_layer("mixer_out"), by_layer("ffn_out")
    params = variables["params"]
    vectors = {
        name: {n: np.asarray(x, np.float64) for n, x in layer_values(c, params, name).items()}
        for name in ("mixer_res_query", "mixer_res_gain", "ffn_res_query", "ffn_res_gain")
    }
    memory, running, rows = [np.asarray(params["embed"], np.float64)[batch.tokens_BT]], [], []
    for n in range(1, c.num_layers + 1):
        rows.append(mean_weights(memory + running, vectors["mixer_res_query"][n], vectors["mixer_res_gain"][n]))
        if c.attn_res == "full":
            memory.append(mixer_out[n])
        else:
            running = [sum(running) + mixer_out[n]]
        rows.append(mean_weights(memory + running, vectors["ffn_res_query"][n], vectors["ffn_res_gain"][n]))
        if c.attn_res == "full":
            memory.append(ffn_out[n])
        else:
            running = [running[0] + ffn_out[n]]
            if n % c.attn_res_block_size == 0 or n == c.num_layers:
                memory, running = memory + running, []
    rows.append(mean_weights(memory, *(np.asarray(params[f"output_res_{x}"], np.float64) for x in ("query", "gain"))))
    return rows


@pytest.mark.parametrize("form", ["block", "full"])
def test_depth_weights_are_those_of_the_sources(form):
    config, variables, batch, found = case(form, 0.5)
    recorded = recorded_by(form, 0.5)
    want = expected_weights(config, variables, batch, recorded)
    assert len(found.consumers) == len(want) == 2 * 7 + 1
    assert found.consumers[:3] == ("layer 1 mixer", "layer 1 feed-forward", "layer 2 mixer")
    for consumer, row_R, want_R in zip(found.consumers, found.weights_QR, want, strict=True):
        np.testing.assert_allclose(row_R[~np.isnan(row_R)], want_R, rtol=2e-4, err_msg=consumer)
    assert max(np.ptp(row) for row in want) > 0.2  # the queries matter


def test_sources_of_the_block_form_have_their_places():
    found = case("block", 0.0)[-1]
    assert found.sources == ("embedding", "block 1", "block 2", "block 3", "block 4", "running sum")
    exists = ~np.isnan(found.weights_QR)
    layer = {name: exists[i].astype(int).tolist() for i, name in enumerate(found.consumers)}
    assert layer["layer 1 mixer"] == [1, 0, 0, 0, 0, 0]
    assert layer["layer 1 feed-forward"] == [1, 0, 0, 0, 0, 1]
    assert layer["layer 3 mixer"] == [1, 1, 0, 0, 0, 0]
    assert layer["layer 4 mixer"] == [1, 1, 0, 0, 0, 1]
    assert layer["layer 7 feed-forward"] == [1, 1, 1, 1, 0, 1]
    assert layer["output"] == [1, 1, 1, 1, 1, 0]


def test_sources_of_the_full_form_have_their_places():
    found = case("full", 0.0)[-1]
    assert len(found.sources) == 1 + 2 * 7 and found.sources[3] == "layer 2 mixer"
    assert (~np.isnan(found.weights_QR)).sum(1).tolist() == list(range(1, 16))


@pytest.mark.parametrize("form", ["block", "full"])
def test_fresh_queries_weigh_all_sources_alike(form):
    weights_QR = case(form, 0.0)[-1].weights_QR
    np.testing.assert_allclose(np.nansum(weights_QR, 1), 1, rtol=1e-5)
    for row_R in weights_QR:
        used_R = row_R[~np.isnan(row_R)]
        np.testing.assert_allclose(used_R, 1 / len(used_R), rtol=1e-5)


def test_an_ordinary_residual_stream_has_no_depth_weights():
    found = case("none", 0.0)[-1]
    assert found.consumers == () and found.weights_QR.shape == (0, 0)
    assert found.kda_layers == (1, 2, 3, 4, 5, 6)


def test_decays_are_counted_once_for_every_token_and_channel():
    config, _, batch, found = case("block", 0.5)
    recorded = recorded_by("block", 0.5)
    mask = batch.segment_ids_BT != 0
    assert found.tokens == mask.sum() == 17 and found.kda_layers == (1, 2, 3, 4, 5, 6)
    assert (found.decay_counts_NJX.sum(-1) == 17 * K).all()
    log_decay = layer_values(config.model, recorded, "kda", "log_decay")
    for n, counts_JX in zip(found.kda_layers, found.decay_counts_NJX, strict=True):
        half_life_NJK = np.log(2) / -np.asarray(log_decay[n], np.float64)[mask]
        for head in range(J):
            want_X, _ = np.histogram(half_life_NJK[:, head], found.half_life_edges_Y)
            assert np.abs(counts_JX[head] - want_X).sum() <= 2  # a value at an edge may round to either side


def test_no_decay_and_all_decay_have_bins_of_their_own():
    # g = 0 never forgets; g = -5 has a half-life of 0.139 tokens, in the twelfth bin above 0.01.
    for bias, bin_ in ((-1e4, -1), (1e4, 12)):
        variables = variables_of(ONE_LAYER, 0.0)
        kda = variables["params"]["stage_0"]["run_0"]["layer_0"]["kda"]
        kda["dt_bias"] = jnp.full_like(kda["dt_bias"], bias)
        counts_JX = collect_diagnostics(ONE_LAYER, variables, padded_batch()).decay_counts_NJX[0]
        assert counts_JX[:, bin_].tolist() == [17 * K] * J


def test_padding_does_not_matter():
    config, variables, batch, found = case("block", 0.5)
    other = np.where(batch.segment_ids_BT == 0, 7, batch.tokens_BT).astype(np.int32)
    again = collect_diagnostics(config, variables, batch._replace(tokens_BT=other))
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_quantiles_follow_the_histogram():
    found = case("block", 0.5)[-1]
    edges_Y = np.array([0.0, 1.0, 10.0, 100.0, np.inf])
    counts_NJX = np.array([[[0, 10, 10, 0], [4, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]]])
    made = found._replace(half_life_edges_Y=edges_Y, decay_counts_NJX=counts_NJX)
    np.testing.assert_allclose(half_life_quantile(made, 0.5), [[10, 1, 100, np.nan]])
    np.testing.assert_allclose(half_life_quantile(made, 0.25)[0, 0], 10**0.5)
    np.testing.assert_allclose(half_life_quantile(made, 1.0)[0, 0], 100)


def test_only_so_many_tokens_are_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 5)
    assert collect_diagnostics(ONE_LAYER, variables_of(ONE_LAYER, 0.0), padded_batch()).tokens == 9


def test_only_so_many_decays_are_read(monkeypatch):
    variables, batch = variables_of(ONE_LAYER, 0.0), padded_batch()
    monkeypatch.setattr(module, "MAX_DECAYS", 6 * J * K)  # half a row
    found = collect_diagnostics(ONE_LAYER, variables, batch)
    assert found.tokens == 6 and found.decay_counts_NJX.sum() == 6 * J * K


@pytest.mark.parametrize(
    ("layers", "heads", "seq_len", "part"),
    [
        (2, 2, 1024, (16, 1024)),  # 16384 tokens
        (2, 2, 20000, (1, 20000)),
        (93, 96, 4096, (1, 316)),  # Kimi K3's size: 69 of the layers are KDA's
        (8, 32, 4096, (2, 4096)),
    ],
)
def test_how_much_is_read_follows_the_size_of_the_model(layers, heads, seq_len, part):
    model = ModelConfig.kimi_k3(num_layers=layers, kda_num_heads=heads, kda_key_dim=128)
    kda_layers = layers - len(model.global_layers)
    assert module.part_to_read(model, seq_len) == part
    assert part[0] * part[1] * kda_layers * heads * 128 <= max(2**28, seq_len)


def test_parameters_on_every_device_give_the_same():
    variables = variables_of(ONE_LAYER, 0.0)
    alone = collect_diagnostics(ONE_LAYER, variables, padded_batch())
    on_all = jax.device_put(variables, replicated(make_mesh(MeshConfig())))
    spread = collect_diagnostics(ONE_LAYER, on_all, padded_batch())
    np.testing.assert_array_equal(spread.decay_counts_NJX, alone.decay_counts_NJX)


def test_a_file_gives_back_what_was_written(tmp_path):
    config, variables, batch, found = case("block", 0.5)
    assert read_diagnostics(tmp_path) is None
    assert write_diagnostics(tmp_path, config, variables, batch) == tmp_path / "diagnostics.npz"
    again = read_diagnostics(tmp_path)
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert type(again.tokens) is int and again.consumers == found.consumers
    assert [path.name for path in tmp_path.iterdir()] == ["diagnostics.npz"]
