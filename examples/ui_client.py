"""Drive a run through the API of the web UI: start it, follow it, stop and save, resume, fetch the adapter.

lorashard ui --allow examples          # in one terminal; it prints its address with the token
export LORASHARD_TOKEN=...             # in another: what stands behind `?token=`; as an option, all users would see it
python examples/ui_client.py --url http://127.0.0.1:7860 --name first --cpu 2 \
    --model_name_or_path examples/demo/base --dataset examples/demo/train.jsonl --max_steps 40 --learning_rate 5e-3
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

from gradio_client import Client

LIVE = ("queued", "starting", "running", "stopping")


def main() -> None:
    """Run it all once."""
    parser = argparse.ArgumentParser(description="Drive a run through the web UI's API; other options are the run's.")
    parser.add_argument("--url", default="http://127.0.0.1:7860", help="The address of `lorashard ui`, without token.")
    parser.add_argument("--auth", help="user:password, where the server asks for one.")
    parser.add_argument("--name", default="", help="The run's name; not given: the server makes one.")
    parser.add_argument("--stop_at", type=int, default=10, help="The step after which it is stopped once.")
    asked, words = parser.parse_known_args()
    options = {word.removeprefix("--"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    token = os.environ.get("LORASHARD_TOKEN")
    client = Client(
        asked.url,
        auth=tuple(asked.auth.split(":", 1)) if asked.auth else None,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        verbose=False,
    )

    def call(endpoint: str, **arguments: Any) -> Any:
        return client.predict(api_name=f"/{endpoint}", **arguments)

    plan = call("plan", options=options)
    print(f"plan: {plan['cluster']}: {plan['reason']}")
    name = call("start_run", name=asked.name, options=options)
    print(f"started: {name}")

    run = follow(call, name, until_step=asked.stop_at)
    if run["state"] in LIVE:
        call("stop_run", name=name)  # it saves first
        run = follow(call, name, from_step=run["step"])
        print(f"{run['state']} after step {run['step']}")
    if run["state"] == "stopped":
        while call("get_run", name=name)["why_no_resume"]:  # its last process has still to end
            time.sleep(0.5)
        call("resume_run", name=name)
        run = follow(call, name, from_step=run["step"])
    if run["state"] != "done":
        raise SystemExit(f"{run['state']}: {run['error']}\n{call('get_log', name=name)}")
    for row in call("get_ranks", name=name):
        print(f"rank {row['rank']}: held {row['peak_bytes']:,} bytes at most, waited {row['wait_s']:.1f} s for gathers")
    print(f"adapter: {call('get_adapter', name=name)}")


def follow(call: Any, name: str, from_step: int = 0, until_step: float = math.inf) -> dict[str, Any]:
    """Print the losses of a run after a step, until it has ended or done another; return how it is then."""
    while True:
        run = call("get_run", name=name)
        loss = call("get_series", name=name, names=["loss"]).get("loss", {"steps": [], "values": []})
        for step, value in zip(loss["steps"], loss["values"], strict=True):
            if step > from_step:
                print(f"  step {step:.0f} of {run['max_steps']}: loss {value:.3f}", flush=True)
                from_step = round(step)
        if run["state"] not in LIVE or from_step >= until_step:
            return run | {"step": from_step}
        time.sleep(0.5)


if __name__ == "__main__":
    main()
