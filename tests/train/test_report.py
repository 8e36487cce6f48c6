"""The report of made-up runs: what is in it, what is left out, and that it needs nothing else."""

import base64
import html.parser
import json
import math
import re
import struct

import numpy as np
import pytest

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, to_dict
from k3jax.models.plan import layer_kinds
from k3jax.train import report, report_inside, report_plots
from k3jax.train.diagnostics import HALF_LIFE_EDGES_X, Diagnostics
from k3jax.train.report import write_report
from k3jax.train.report_style import Series, evenly_spread, running_mean

ALL = {
    "loss", "optimizer", "throughput", "load_over_time", "load_by_layer", "max_violation", "depth_weights",
    "half_lives", "half_life_by_head",
}  # fmt: skip
SECTIONS = [
    "Overview",
    "Training",
    "Expert balance",
    "Attention Residuals",
    "Decay of KDA layers",
    "Configuration and versions",
]
VOID = {"meta", "img", "br", "link", "hr"}


class Page(html.parser.HTMLParser):
    """Checks nesting while it reads, and collects what the tests look at."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.headings, self.images, self.links, self.tags, self.words = [], [], [], [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.links += [value for name, value in attrs.items() if name in ("src", "href", "srcset", "action", "data")]
        if tag == "img":
            assert attrs["alt"]
            self.images.append(attrs["src"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def tiny(**changes) -> Config:
    values = {"vocab_size": 257, "num_layers": 4, "hidden_size": 16, "num_experts": 8, "num_experts_per_token": 2}
    model = ModelConfig(**(values | {"kda_num_heads": 2, "attn_res_block_size": 2} | changes))
    return Config(model, DataConfig(seq_len=64), OptimConfig(), MeshConfig(), TrainConfig(steps=100))


def training_records(steps=100, every=10, experts=8, layers=(2, 3, 4)) -> list[dict]:
    rng, records = np.random.default_rng(0), []
    for step in [1, *range(every, steps + 1, every)]:
        load = {str(n): rng.multinomial(512, np.full(experts, 1 / experts)).tolist() for n in layers}
        by_layer = {n: max(x) * experts / sum(x) - 1 for n, x in load.items()}
        records.append({
            "step": step, "loss": 1 + 4 / step, "tokens": 500 * step, "bits_per_byte": (1 + 4 / step) / math.log(2),
            "learning_rate": 1e-3, "grad_norm": 0.5, "skipped": int(step > 50), "tokens_per_second": 1000.0,
            "step_seconds": 0.5, "mfu": 0.2, "max_violation": float(np.mean(list(by_layer.values()))),
            "max_violation_worst": max(by_layer.values()), "max_violation_by_layer": by_layer, "load": load,
        })  # fmt: skip
        if step % 50 == 0:
            loss = 2 - step / 100
            records.append(
                {"step": step, "eval_loss": loss, "eval_bits_per_byte": loss / math.log(2), "eval_seconds": 5}
            )
    return records


def made_up_diagnostics(config: Config) -> Diagnostics:
    kda = tuple(n for n, kind in enumerate(layer_kinds(config.model), start=1) if kind.mixer == "kda")
    sources = ("embedding", "block 1", "block 2", "running sum")
    weights = np.full((9, 4), np.nan, np.float32)
    weights[:, :2] = 0.5
    counts = np.zeros((len(kda), 2, len(HALF_LIFE_EDGES_X) - 1), np.int64)
    counts[:, :, 20:40] = 10
    return Diagnostics(1234, tuple(f"c{i}" for i in range(9)), sources, weights, kda, counts, HALF_LIFE_EDGES_X)


def save_diagnostics(path, diagnostics: Diagnostics) -> None:
    np.savez(path / "diagnostics.npz", **{k: np.asarray(v) for k, v in diagnostics._asdict().items()})


def write_run(path, config=None, records=(), diagnostics=None, gin="", versions=None):
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(to_dict(config)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if gin:
        (path / "config.gin").write_text(gin)
    if versions is not None:
        (path / "versions.json").write_text(json.dumps(versions))
    if diagnostics is not None:
        save_diagnostics(path, diagnostics)
    return path


def pictures(path) -> set[str]:
    return {file.stem for file in (path / "report").iterdir()}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A run with everything, and hostile text wherever text goes."""
    config = tiny()
    path = tmp_path_factory.mktemp("runs") / 'run <b>"x" & co'
    gin = 'DataConfig.paths = ("</pre><script>alert(1)</script>", "a&b")\n'
    versions = {"jax": "0.10.2", "note<i>": "<img src=x onerror=alert(2)>", "resumed": [{"step": 3, "jax": "0.11"}]}
    write_run(path, config, training_records(), made_up_diagnostics(config), gin, versions)
    (path / "parameters.txt").write_text("embed  4,112\n")
    assert write_report(path) == path / "report.html"
    return path


def test_a_complete_run_has_every_section_and_picture(full):
    page = Page((full / "report.html").read_text())
    assert page.headings == SECTIONS
    assert pictures(full) == ALL
    assert len(page.images) == len(ALL)


def test_pictures_are_inside_the_page_and_beside_it(full):
    page = Page((full / "report.html").read_text())
    inside = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.images}
    beside = {file.read_bytes() for file in (full / "report").glob("*.png")}
    assert inside == beside
    for image in inside:
        assert image.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", image[16:24])
        assert 800 <= width <= 1200 and 200 <= height <= 1700


def test_nothing_is_fetched_and_nothing_runs(full):
    text = (full / "report.html").read_text()
    page = Page(text)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert not page.tags & {"script", "link", "iframe", "object", "base", "b", "i"}
    assert "@import" not in text and "url(" not in text
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)


def test_text_of_the_run_is_shown_as_it_is(full):
    text = Page((full / "report.html").read_text()).text
    assert 'DataConfig.paths = ("</pre><script>alert(1)</script>", "a&b")' in text
    assert 'Training run run <b>"x" & co' in text
    assert "<img src=x onerror=alert(2)>" in text and '[{"step": 3, "jax": "0.11"}]' in text
    assert "embed 4,112" in text


def test_headline_numbers(full):
    text = Page((full / "report.html").read_text()).text
    assert "held-out loss 1.0000 nats per token, step 100" in text
    assert f"held-out bits per byte {1 / math.log(2):.3f} step 100" in text
    assert "tokens 50k trained on" in text
    assert "throughput 1,000 tokens per second, median" in text
    assert "MFU 20.0%" in text
    assert "time 1:00 steps and evaluation" in text  # 100 steps of half a second and two evaluations of five
    assert "steps 100 of 100" in text and "steps skipped 1 " in text


def test_files_are_whole_and_nothing_else_is_left(full):
    names = {file.name for file in full.rglob("*") if file.is_file()}
    assert not [name for name in names if "tmp" in name]


@pytest.fixture
def unrendered(monkeypatch):
    """Draws, but leaves the rendering, which takes most of the time, to the tests of the complete run."""

    def png(draw, *args):
        draw(*args)
        return b"png"

    monkeypatch.setattr(report, "png", png)


def test_an_empty_directory_gives_a_page(tmp_path):
    page = Page(write_report(tmp_path).read_text())
    assert page.headings == ["Overview"] and page.images == []
    assert "No step has been logged." in page.text


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"drop": {"load", "max_violation", "max_violation_worst", "max_violation_by_layer"}}, "Expert balance"),
        ({"model": {"attn_res": "none"}}, "Attention Residuals"),
        ({"model": {"kda_per_mla": 0}}, "Decay of KDA layers"),
    ],
)
def test_what_a_model_lacks_has_no_section(tmp_path, unrendered, changes, missing):
    config = tiny(**changes.get("model", {}))
    found = made_up_diagnostics(config)
    if config.model.attn_res == "none":
        found = found._replace(consumers=(), sources=(), weights_QR=np.zeros((0, 0), np.float32))
    kept = [{k: v for k, v in r.items() if k not in changes.get("drop", ())} for r in training_records()]
    page = Page(write_report(write_run(tmp_path, config, kept, found, "a = 1\n")).read_text())
    assert page.headings == [name for name in SECTIONS if name != missing]


@pytest.mark.parametrize("name", sorted(set(training_records()[1]) - {"step"}))
def test_a_metric_may_be_missing_or_null(tmp_path, unrendered, name):
    """One metric away in one record, null in the others; few steps, so that it is quick."""
    records = training_records(steps=30)
    for record in records:
        if name in record:
            record[name] = None
    del records[0][name]
    write_report(write_run(tmp_path, None, records))
    gone = {"loss": {"loss"}, "load": {"load_over_time", "load_by_layer"}}.get(name, set())
    assert pictures(tmp_path) == ALL - {"depth_weights", "half_lives", "half_life_by_head"} - gone


def test_torn_and_foreign_lines_are_passed_over(tmp_path, unrendered):
    write_run(tmp_path, tiny(), training_records(steps=20))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('[1, 2]\n{"no": "step"}\n\n{"step": 30, "loss": 0.')
    (tmp_path / "versions.json").write_text("{torn")
    (tmp_path / "diagnostics.npz").write_bytes(b"PK\x03\x04 broken")
    assert "steps 20 of 100" in Page(write_report(tmp_path).read_text()).text


def test_a_configuration_of_another_version_does_not_stop_the_report(tmp_path, unrendered):
    write_run(tmp_path, None, training_records(steps=20))
    (tmp_path / "config.json").write_text('{"model": {"no_such_field": 1}}')
    assert "Expert balance" in Page(write_report(tmp_path).read_text()).headings


def test_a_picture_of_an_earlier_report_goes(tmp_path, unrendered):
    write_report(write_run(tmp_path, None, training_records(steps=20)))
    assert "max_violation" in pictures(tmp_path)
    (tmp_path / "report" / "mine.png").write_bytes(b"")
    write_report(write_run(tmp_path, None, [{"step": 1, "loss": 2.0}]))
    assert pictures(tmp_path) == {"loss", "mine"}


def test_loads_given_as_lists_belong_to_the_moe_layers(tmp_path):
    records = [{"step": 1, "load": [[1, 1], [3, 1], [2, 2]]}, {"step": 2, "load": [[1, 1], [2, 2], [4, 0]]}]
    run = report._Run(tmp_path, tiny(num_experts=3), records, None)
    loads = report._loads(run)
    assert loads.layers == [2, 3, 4] and loads.load_SNE.shape == (2, 3, 2)
    by_layer, mean, worst = report._violations(run, loads)
    assert by_layer[3].values.tolist() == [0.5, 0.0] and worst.values.tolist() == [0.5, 1.0]
    np.testing.assert_allclose(mean.values, [1 / 6, 1 / 3])


def test_pooled_loads_keep_their_sum():
    steps = np.array([1.0, 10, 20, 30, 5000, 10_000])
    load = np.arange(24.0).reshape(6, 2, 2)
    pooled = report_plots._pool(steps, load)
    assert pooled.shape == (6, 2, 2)
    np.testing.assert_array_equal(pooled[0], load[:4].sum(0))
    np.testing.assert_array_equal(pooled[1], pooled[0])  # nothing logged there
    many = np.arange(1.0, 1001)
    pooled = report_plots._pool(many, np.ones((1000, 1, 3)))
    assert len(pooled) == report_plots.MAX_COLUMNS and pooled.sum() == 3000


def test_the_running_mean_of_a_constant_is_the_constant():
    values = np.full(400, 3.0)
    values[[0, 200]] = 3.0
    np.testing.assert_allclose(running_mean(values), 3.0)
    ramp = np.arange(400.0)
    np.testing.assert_allclose(running_mean(ramp)[10:-10], ramp[10:-10])
    assert len(running_mean(np.arange(5.0))) == 5


def test_small_helpers():
    assert evenly_spread(93, 4) == [0, 31, 61, 92] and evenly_spread(3, 12) == [0, 1, 2] and evenly_spread(1, 5) == [0]
    assert [report_inside.format_tokens(x) for x in (0.139, 3.21, 150, 12_000)] == ["0.14", "3.2", "150", "12k"]
    assert not Series(np.zeros(0), np.zeros(0)) and Series(np.zeros(1), np.zeros(1))
    assert report._series([(1, 2.0), (2, None), (3, math.inf), (4, 1)]).steps.tolist() == [1, 4]


def test_many_layers_become_rows_of_a_heat_map():
    steps = np.array([1.0, 10, 20])
    by_layer = {n: Series(steps, np.full(3, 0.1 * n)) for n in range(2, 22)}
    figure = report_plots.violation_curves(by_layer, Series(steps, np.ones(3)), Series(steps, 2 * np.ones(3)), "none")
    shown = next(image.get_array() for axis in figure.axes for image in axis.images)
    np.testing.assert_allclose(shown, 0.1 * np.arange(2, 22)[:, None] * np.ones(3))
    found = made_up_diagnostics(tiny(num_layers=20, kda_per_mla=None, last_layer="by_ratio"))
    assert len(found.kda_layers) == 20
    mesh = report_inside.half_lives(found, 0.139, 64).axes[0].collections[0].get_array()
    assert mesh.shape == (20, 82) and np.allclose(mesh.sum(1), 1)


@pytest.mark.parametrize("layers", [2, 20])
def test_perfect_balance_is_drawn_at_a_tick_called_0(layers):
    steps = np.array([1.0, 10, 20])
    by_layer = {n: Series(steps, np.array([0.5, 0.0, 0.0])) for n in range(layers)}
    figure = report_plots.violation_curves(by_layer, by_layer[0], by_layer[0], "none")
    figure.canvas.draw()
    scales = [figure.axes[0]] if layers == 2 else [figure.axes[0], figure.axes[-1]]  # the last is the colour bar
    for axis in scales:
        ticks = {label.get_text(): label.get_position()[1] for label in axis.get_yticklabels()}
        assert ticks["0"] == 0 and ticks["0.001"] == pytest.approx(0.001) and "0.1" in ticks
    assert figure.axes[0].lines[0].get_ydata().min() == 0


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_labels_of_depth_weights_are_inside_the_picture(layers):
    weights = np.full((2 * layers + 1, 3), 0.3, np.float32)
    found = made_up_diagnostics(tiny())._replace(weights_QR=weights, sources=("embedding", "block 1", "running sum"))
    figure = report_inside.depth_weights(found)
    figure.canvas.draw()
    box = figure.axes[-1].yaxis.label.get_window_extent()
    assert box.y0 > 0 and box.y1 < figure.bbox.y1 and box.x1 < figure.bbox.x1


@pytest.mark.parametrize(("steps", "drawn"), [(30, "Each logged step."), (900, "Faint: each logged step.")])
def test_the_caption_of_the_loss_says_what_is_drawn(tmp_path, unrendered, steps, drawn):
    records = [{"step": r["step"], "loss": r["loss"]} for r in training_records(steps) if "loss" in r]
    text = Page(write_report(write_run(tmp_path, None, records)).read_text()).text
    assert drawn in text and ("running mean" in text) == (steps == 900)
    assert "Bits per byte" not in text
