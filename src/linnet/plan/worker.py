"""Worker process that compiles plans (`python -m linnet.plan.worker`): reads runs as JSON from stdin and writes one plan per line
of JSON. It uses fake devices and runs nothing on them.
"""

from __future__ import annotations

import json
import sys

from linnet.config.codec import run_from_dict
from linnet.parallel.mesh import n_devices, parse_mesh
from linnet.plan.compiling import use_fake_devices
from linnet.plan.outcome import MAX_DEVICES, to_json


def main() -> None:
    task = json.load(sys.stdin)
    configs = [run_from_dict(values) for values in task["runs"]]
    use_fake_devices(min(MAX_DEVICES, max(n_devices(parse_mesh(cfg.mesh)) for cfg in configs)))
    from linnet.plan.training import plan_training

    for cfg in configs:
        print(json.dumps(to_json(plan_training(cfg, task["most"]))), flush=True)


if __name__ == "__main__":
    main()
