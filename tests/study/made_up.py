"""Run directories and sweeps with made-up numbers, as `k3 train` and `k3 sweep` would leave them."""

import dataclasses
import json
import pathlib

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, to_dict
from k3jax.study.plan import Plan, PlannedRun, SweepDir, write_plan
from tests.train.tiny_run import MODEL

TOKENS = 100  # a step


def config(model=(), optim=(), **train) -> Config:
    """A small configuration; keywords are fields of TrainConfig."""
    return Config(
        ModelConfig(**(MODEL | dict(model))),
        DataConfig(seq_len=32, batch_size=8),
        OptimConfig(**dict(optim)),
        MeshConfig(),
        TrainConfig(**({"steps": 40, "log_every": 10, "eval_every": 10} | train)),
    )


def write_run(path: pathlib.Path, its_config: Config, losses: dict[int, float | None], state="finished", speed=1000.0):
    """A run directory that was evaluated at the given steps; its training loss is the held-out loss and 0.1."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(to_dict(its_config)))
    lines = []
    for step, loss in losses.items():
        known = loss is not None
        record = {
            "step": step,
            "loss": loss + 0.1 if known else 9.0,
            "tokens": TOKENS * step,
            "tokens_per_second": speed,
        }
        lines.append(json.dumps(record))
        if known:
            lines.append(json.dumps({"step": step, "eval_loss": loss}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if state == "finished":
        (path / "summary.json").write_text("{}")
    return path


def seeds(base: Config, count: int) -> list[Config]:
    return [dataclasses.replace(base, train=dataclasses.replace(base.train, seed=seed)) for seed in range(count)]


def write_sweep(path: pathlib.Path, ratios=(1, 3), count=3, **options) -> SweepDir:
    """A sweep over kda_per_mla and seeds, of which no run has begun."""
    base = config(**options)
    runs = []
    for ratio in ratios:
        model = dataclasses.replace(base.model, kda_per_mla=ratio)
        for seed, own in enumerate(seeds(dataclasses.replace(base, model=model), count)):
            labels = {"ModelConfig.kda_per_mla": str(ratio), "TrainConfig.seed": str(seed)}
            runs.append(PlannedRun(f"kda_per_mla={ratio},seed={seed}", labels, own))
    axes = {"ModelConfig.kda_per_mla": [str(r) for r in ratios], "TrainConfig.seed": [str(s) for s in range(count)]}
    path.mkdir(parents=True)
    write_plan(Plan(base, axes, "product", None, runs), SweepDir(path).plan)
    return SweepDir(path)
