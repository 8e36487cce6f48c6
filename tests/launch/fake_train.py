"""A run that computes nothing: `python fake_train.py CONFIG WORKDIR` leaves what `k3 train` would and stops as it does.

Seed 13 fails half way. A step's loss hangs on the seed and the step alone, so a run that went on shows it.
"""

import json
import signal
import sys
import time

from k3jax.train.claim import Claim
from launch.configure import load_config

SECONDS = 0.03  # a step


def main(gin_file: str, workdir: str) -> int:
    config = load_config([gin_file]).config
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    with Claim(workdir, config) as claim:
        claim.write_config()
        run = claim.run
        step = len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0
        print(f"from step {step}", flush=True)
        while step < config.train.steps and not asked:
            time.sleep(SECONDS)
            step += 1
            if config.train.seed == 13 and step > 2:
                print("k3 train: error: stopped at step 3: not finite\n", flush=True)
                return 1
            loss = config.train.seed + 10 / step
            record = {"step": step, "loss": loss, "eval_loss": loss, "tokens": 100 * step}
            with open(run.metrics, "a") as file:
                file.write(json.dumps(record) + "\n")
        if asked:
            return 128 + asked[0]
        run.summary.write_text("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
