"""Scenarios of a running SGLang engine and a trainer in another process: serving.py SCENARIO FOLDER prints JSON."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import engine as classes
import torch

from support.jobs import Meeting

PROMPT, TOKENS = [1, 2, 3, 4], 6
labels: list[str] = []
"""Versions that the replies of the engine name."""


def trainer(meeting: Meeting, folder: Path, versions: dict[int, str], receivers: int) -> None:
    """Sends versions, each when it is asked for. ``versions`` has what happens to each while it is sent."""
    from transformers import AutoModelForCausalLM

    import epload
    from epload.transfer import shards

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    buckets, happens = 0, ""
    pack = shards.Shards.pack

    def gated(self: Any, number: int, bucket: Any) -> None:
        nonlocal buckets
        buckets += 1  # of this version
        if buckets == 4 and happens == "waits":
            meeting.say("waiting")
            meeting.hear("go on", 100)
        if happens == "dies":
            os._exit(9)
        pack(self, number, bucket)

    shards.Shards.pack = gated  # type: ignore[method-assign]
    with epload.WeightSender(model, "127.0.0.1:0", receivers=receivers, timeout=60) as sender:
        meeting.say("address", sender.address)
        for version in versions:
            meeting.hear(f"send {version}", 200)
            buckets, happens = 0, versions[version]
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
    reply = engine.generate(input_ids=[PROMPT], sampling_params=sampling)[0]
    labels.append(reply["meta_info"]["weight_version"])
    return reply["output_ids"]


def generate_across(engine: Any, call: Any, count: int = 100) -> tuple[list[int], list[dict[str, Any]]]:
    """Calls something while a request runs. Returns the request's tokens, and the versions that computed them."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    replies: list[Any] = []
    some = threading.Event()

    def stream() -> None:
        for reply in engine.generate(input_ids=[PROMPT], sampling_params=sampling, stream=True):
            replies.append(reply)
            if len(replies) == 5:
                some.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert some.wait(100)
    call()
    thread.join(100)
    return replies[-1]["output_ids"], replies[-1]["meta_info"]["weight_versions"]


def expected(folder: Path, count: int = TOKENS, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens that transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


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
        if version == 1:
            found["staged"] = generate(engine)
        if version == 3:
            tokens, spans = generate_across(engine, lambda: engine.collective_rpc("epload_commit"))
            end = spans[0]["end"]
            continued = expected(folder / "version-3", len(tokens) - end, PROMPT + tokens[:end])
            found["across"] = [tokens, [span["version"] for span in spans]]
            found["expected across"] = expected(folder / "version-2", end) + continued
        else:
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
    found["labels"] = labels
    engine.shutdown()
    return found


def digests(folder: Path, tensor_parallel: int, expert_parallel: int) -> dict[str, Any]:
    """Checksums of all tensors on all ranks after versions, and after SGLang's own load of each from disk."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    meeting, found = Meeting(str(folder)), {"synced": [], "loaded": [], "errors": []}
    engine = make_engine(folder, tensor_parallel, ep_size=expert_parallel)

    def add(place: str) -> None:
        ok, message, ranks, _ = engine.loop.run_until_complete(
            engine.tokenizer_manager.check_weights(CheckWeightsReqInput(), None)
        )
        assert ok, message
        found[place].append([rank["checksums"] for rank in ranks])

    _, address = start(meeting, folder, {1: "", 2: ""}, tensor_parallel)
    add("synced")
    for version in (1, 2):
        engine.collective_rpc("epload_receive", address=address, version=version, verify=False)
        meeting.say(f"send {version}")
        assert meeting.hear(f"sent {version}", 100) == ""
        engine.collective_rpc("epload_commit")
        add("synced")
    for place in (folder, folder / "version-1", folder / "version-2"):
        assert engine.update_weights_from_disk(str(place))[0]
        add("loaded")
    engine.shutdown()
    return found


def server(folder: Path, tensor_parallel: int) -> dict[str, Any]:
    """A server that is asked over HTTP: a version, one that is refused, requests that are wrong."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = classes.server_arguments(
        folder, tensor_parallel, load_format="private", host="127.0.0.1", port=port, sampling_backend="pytorch",
        log_level="warning", max_running_requests=2,
    )  # fmt: skip
    flags = [
        text
        for name, value in options.items()
        for text in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", *flags, "--skip-server-warmup", "--disable-overlap-schedule"]
    )

    def post(path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as reply:
                return json.loads(reply.read() or "null")
        except HTTPError as error:
            return json.loads(error.read())

    def update(weight_version: str | None = None, **call: Any) -> tuple[bool, str]:
        encoded = base64.b64encode(json.dumps(call).encode()).decode()
        reply = post(
            "/update_weights_from_tensor", serialized_named_tensors=[encoded], load_format="epload",
            weight_version=weight_version,
        )  # fmt: skip
        return reply["success"], reply["message"]

    def tokens() -> tuple[list[int], str]:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        reply = post("/generate", input_ids=PROMPT, sampling_params=sampling)
        return reply["output_ids"], reply["meta_info"]["weight_version"]

    try:
        while True:
            assert process.poll() is None
            try:
                post("/health")
                break
            except OSError:  # it is not there yet
                time.sleep(0.5)
        meeting = Meeting(str(folder))
        _, address = start(meeting, folder, {1: "", 2: ""}, tensor_parallel)
        found: dict[str, Any] = {"tokens": [tokens()], "wrong": [update(call="recieve"), update(call="receive")]}
        found["started"] = update(call="receive", address=address, version=1)
        found["wrong"].append(update(call="commit"))
        found["tokens"].append(tokens())
        meeting.say("send 1")
        assert meeting.hear("sent 1", 100) == ""
        found["committed"] = update("1", call="commit")
        found["tokens"].append(tokens())
        update(call="receive", address=address, version=7)
        meeting.say("send 2")
        meeting.hear("sent 2", 100)
        found["refused"] = update("7", call="commit")
        found["tokens"].append(tokens())
        found["expected"] = [expected(folder), expected(folder / "version-1")]
    finally:
        process.terminate()
        process.wait(30)
    return found


if __name__ == "__main__":
    name, place, *numbers = sys.argv[1:]
    print(json.dumps(globals()[name](Path(place), *map(int, numbers))))
