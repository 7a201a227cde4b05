"""Scenarios of a running SGLang engine and a trainer in another process: serving.py SCENARIO FOLDER prints JSON."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

import engine as classes
import torch

from support.jobs import Meeting

PROMPT, TOKENS = [1, 2, 3, 4], 6


def trainer(meeting: Meeting, folder: Path, versions: dict[int, str], receivers: int) -> None:
    """Sends versions, each as soon as the meeting has been told. ``versions`` has what happens to each."""
    import epload
    from epload.transfer import shards
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    buckets = 0
    pack = shards.Shards.pack

    def gated(self: Any, number: int, bucket: Any) -> None:
        nonlocal buckets
        buckets += 1
        if buckets == 4 and happens == "waits":
            meeting.say("waiting")
            meeting.hear("go on", 100)
        if happens == "dies":
            meeting.say("dead")
            sys.stdout.flush()
            __import__("os")._exit(9)
        pack(self, number, bucket)

    shards.Shards.pack = gated  # type: ignore[method-assign]
    with epload.WeightSender(model, "127.0.0.1:0", receivers=receivers, timeout=60) as sender:
        meeting.say("address", sender.address)
        for version, happens in versions.items():
            meeting.hear(f"send {version}", 200)
            buckets = 0
            torch.manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.25)
            model.save_pretrained(folder / f"version-{version}")
            try:
                sender.send_weights(version)
                meeting.say(f"sent {version}")
            except epload.LoadError as error:
                meeting.say(f"sent {version}", str(error))


def start(meeting: Meeting, folder: Path, versions: dict[int, str], receivers: int) -> tuple[Any, str]:
    process = multiprocessing.get_context("spawn").Process(
        target=trainer, args=(meeting, folder, versions, receivers), daemon=True
    )
    process.start()
    return process, meeting.hear("address", 100)


def make_engine(folder: Path, tensor_parallel: int, **arguments: Any) -> Any:
    import sglang

    return sglang.Engine(
        **classes.server_arguments(
            folder, tensor_parallel, max_running_requests=2, sampling_backend="pytorch", disable_overlap_schedule=True,
            skip_server_warmup=True, log_level="warning", load_format="private", **arguments,
        )
    )  # fmt: skip


def generate(engine: Any, count: int = TOKENS) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return engine.generate(input_ids=[PROMPT], sampling_params=sampling)[0]["output_ids"]


def expected(folder: Path, count: int = TOKENS) -> list[int]:
    """The tokens that transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tokens[0, len(PROMPT) :].tolist()


def refusal(call: Any, **arguments: Any) -> str:
    try:
        call(**arguments)
    except AssertionError as error:
        return str(error)
    return ""


def versions(folder: Path, tensor_parallel: int) -> dict[str, Any]:
    """Three versions after the first; generation while bytes move; a version that is refused; a sender that dies."""
    meeting = Meeting(str(folder))
    engine = make_engine(folder, tensor_parallel)
    found: dict[str, Any] = {"tokens": [generate(engine)], "expected": [expected(folder)], "meanwhile": []}
    happens = {1: "", 2: "waits", 3: "", 4: "", 5: "dies"}
    process, address = start(meeting, folder, happens, tensor_parallel)
    found["early"] = refusal(engine.collective_rpc, method="epload_commit")
    for version in (1, 2, 3):
        engine.collective_rpc("epload_receive", address=address, version=version)
        meeting.say(f"send {version}")
        if version == 2:
            meeting.hear("waiting", 100)
            found["meanwhile"] = [generate(engine) for _ in range(3)]
            found["pending"] = refusal(engine.collective_rpc, method="epload_receive", address=address, version=version)
            found["arriving"] = refusal(engine.collective_rpc, method="epload_commit", wait=0.1)
            meeting.say("go on")
        assert meeting.hear(f"sent {version}", 100) == ""
        found.setdefault("staged", generate(engine))
        engine.collective_rpc("epload_commit")
        found["tokens"].append(generate(engine))
        found["expected"].append(expected(folder / f"version-{version}"))
    engine.collective_rpc("epload_receive", address=address, version=7)
    meeting.say("send 4")
    found["refused"] = [meeting.hear("sent 4", 100), refusal(engine.collective_rpc, method="epload_commit")]
    found["tokens"].append(generate(engine))
    engine.collective_rpc("epload_receive", address=address, version=5)
    meeting.say("send 5")
    process.join(100)
    found["died"] = refusal(engine.collective_rpc, method="epload_commit")
    found["tokens"].append(generate(engine))
    found["expected"] += [found["expected"][3]] * 2
    engine.shutdown()
    return found


if __name__ == "__main__":
    name, place, *numbers = sys.argv[1:]
    print(json.dumps(globals()[name](Path(place), *map(int, numbers))))
