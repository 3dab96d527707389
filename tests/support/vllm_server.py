"""A server of completions that speaks the protocol of TRL's client, over a stock model with the weights sent.

What vLLM does is the server's: HTTP as the client asks for it, weights by name, type and shape, an update as a whole.
NCCL is not: `stands_in_for_vllm` puts a socket in the place of vLLM's communicator, on the client's side, and lets the
client take any device. Every other line that runs in a trainer is TRL's.

Completions are drawn by the number of the request, so that two runs with the same requests get the same ones.
"""

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.cluster import free_port

_JOINED = {"rank_offset": 1, "world_size": 2, "packed": True}
_ASKED = {"model": "tiny", "return_token_ids": True, "return_tokens_as_token_ids": True}
_DEADLINE = 60  # seconds


class Server:
    """Serves a stock model, which it changes.

    Args:
        model: the model.
        breaks_at: the number of the request for completions that fails.

    Attributes:
        weights: every tensor that it was ever sent, by name, as it was sent last.
        updates: of each update the names.
        requests: the prompts of each request for completions.
    """

    def __init__(self, model: Any, breaks_at: int = -1) -> None:
        self.breaks_at = breaks_at
        self.model, self.weights, self.updates, self.requests = model, {}, [], []
        self.port, self.group_port = free_port(), free_port()
        self._stream: Any = None
        handler = type("Handler", (_Handler,), {"of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def arguments(self) -> dict[str, Any]:
        """What a trainer's arguments say."""
        return {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_host": "127.0.0.1",
            "vllm_server_port": self.port,
            "vllm_group_port": self.group_port,
        }

    # -- what the client asks for

    def health(self) -> dict[str, Any]:
        return {}

    def v1_models(self) -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    def server_info(self) -> dict[str, Any]:
        about = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
        return {"vllm_config": about}

    def get_world_size(self) -> dict[str, Any]:
        return {"world_size": 1}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> dict[str, Any]:
        assert {name: init_info[name] for name in ("rank_offset", "world_size", "packed")} == _JOINED
        self._stream = _connected(init_info["master_address"], init_info["master_port"]).makefile("rb")
        return {}

    def start_weight_update(self) -> dict[str, Any]:
        self.updates.append([])
        return {}

    def update_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Reads what was announced, in its order, and no byte more."""
        columns = (update_info[name] for name in ("names", "dtype_names", "shapes"))
        for name, dtype, shape in zip(*columns, strict=True):
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            value = torch.frombuffer(bytearray(self._stream.read(like.nbytes)), dtype=like.dtype).view(shape)
            self.weights[name] = value
            self.updates[-1].append(name)
        return {}

    def finish_weight_update(self) -> dict[str, Any]:
        """From now on, completions are those of a stock model with just these weights."""
        self.model = stock_model(self.model, self.weights)
        return {}

    def reset_prefix_cache(self) -> dict[str, Any]:
        return {"success": True}

    @torch.no_grad()
    def v1_completions(
        self, prompt: list[list[int]], n: int, max_tokens: int, temperature: float, **_: Any
    ) -> dict[str, Any]:
        assert self.updates, "no weights yet"
        if len(self.requests) == self.breaks_at:
            raise RuntimeError("the engine is dead")
        generator = torch.Generator().manual_seed(len(self.requests))
        self.requests.append(prompt)
        choices = [
            choice for ids in prompt for choice in complete(self.model, ids, n, max_tokens, temperature, generator)
        ]
        return {"choices": choices}


def stock_model(like: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A model of the class and sizes of another, with just these weights."""
    made, info = type(like).from_pretrained(
        None, config=like.config, state_dict=dict(weights), output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return made


def complete(
    model: Any, ids: list[int], count: int, length: int, temperature: float, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Completions of a prompt, in the words of the protocol."""
    rows, chances = torch.tensor([ids] * count), []
    for _ in range(length):
        logits = model.eval()(input_ids=rows, use_cache=False).logits[:, -1].float() / temperature
        below = logits.softmax(-1).cumsum(-1)
        chosen = (below < torch.rand(count, 1, generator=generator)).sum(-1).clamp(max=logits.shape[-1] - 1)
        rows = torch.cat((rows, chosen[:, None]), 1)
        chances.append(logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0])
    for row, each in zip(rows[:, len(ids) :].tolist(), torch.stack(chances, 1).tolist(), strict=True):
        end = row.index(model.config.eos_token_id) + 1 if model.config.eos_token_id in row else len(row)
        names = [f"token_id:{token}" for token in row[:end]]
        probabilities = {"tokens": names, "token_logprobs": each[:end], "top_logprobs": [{} for _ in names]}
        yield {"prompt_token_ids": ids, "token_ids": row[:end], "logprobs": probabilities}


class _Handler(BaseHTTPRequestHandler):
    of: Server
    protocol_version = "HTTP/1.1"

    def _answer(self, given: dict[str, Any]) -> None:
        try:
            name = self.path.partition("?")[0].strip("/").replace("/", "_")
            if name == "v1_completions":
                assert {asked: given.pop(asked) for asked in _ASKED} == _ASKED
                assert given.pop("logprobs") in (0, None)
            status, answer = 200, getattr(self.of, name)(**given)
        except Exception as error:
            status, answer = 400, {"error": repr(error)}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(json.loads(body or b"{}"))

    def log_message(self, *_: Any) -> None:
        pass


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _DEADLINE
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# -- the client's side ------------------------------------------------------------------------------------------------


class Endpoint:
    """What the client keeps for its weights: a socket to the server."""

    def __init__(self, init_info: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", init_info["master_port"])) as waiting:
            self.socket, _ = waiting.accept()
        self.group = SimpleNamespace(store=None, socket=self.socket)


def broadcast(iterator: Iterator[tuple[str, Any]], group: Endpoint, src: int, post_iter_func: Any) -> None:
    """Sends tensor after tensor, and keeps none."""
    assert src == 0
    while (item := next(iterator, None)) is not None:
        group.socket.sendall(post_iter_func(item).contiguous().view(-1).view(torch.uint8).numpy())
        del item


class Colocated:
    """vLLM in the process of a trainer, over the same stock model.

    Attributes:
        model: what generates; set before.
        weights: the tensors that it holds, by name; none while it sleeps.
        updates: of each update the names.
        prompts: all that it was asked to complete.
    """

    model: Any = None

    def __init__(self, seed: int, **_: Any) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.updates: list[list[str]] = [[]]
        self.prompts: list[list[int]] = []
        self._generator = torch.Generator().manual_seed(seed)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        driver = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=driver)

    def _load(self, given: list[tuple[str, torch.Tensor]]) -> None:
        for name, value in given:
            self.weights[name] = value.clone()
            self.updates[-1].append(name)

    def reset_prefix_cache(self) -> None:
        self.updates.append([])

    def sleep(self, level: int) -> None:
        self.weights.clear()

    def wake_up(self, tags: list[str]) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, Any]], sampling_params: dict[str, Any], use_tqdm: bool) -> list[Any]:
        model = stock_model(Colocated.model, self.weights)
        length, temperature = sampling_params["max_tokens"], sampling_params["temperature"]
        outputs = []
        for ids in (prompt["prompt_token_ids"] for prompt in prompts):
            self.prompts.append(ids)
            (found,) = complete(model, ids, 1, length, temperature, self._generator)
            chances = zip(found["token_ids"], found["logprobs"]["token_logprobs"], strict=True)
            chances = [{token: SimpleNamespace(logprob=chance, rank=1)} for token, chance in chances]
            completion = SimpleNamespace(token_ids=found["token_ids"], logprobs=chances)
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[completion]))
        return outputs


@contextlib.contextmanager
def stands_in_for_vllm() -> Iterator[None]:
    """Makes TRL find what it takes of vLLM 0.28 or later."""
    client = importlib.import_module("trl.generation.vllm_client")
    generation = importlib.import_module("trl.generation.vllm_generation")
    distillation = importlib.import_module("trl.trainer.distillation_trainer")
    stock = client.VLLMClient.init_communicator
    given = {
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
        "get_ip": lambda: "127.0.0.1",
        "open_trainer_endpoint": Endpoint,
        "packed_nccl_broadcast_producer": broadcast,
    }
    with contextlib.ExitStack() as changes:
        for module in (client, generation, distillation):
            changes.enter_context(mock.patch.object(module, "is_vllm_available", return_value=True))
        for name, value in given.items():
            changes.enter_context(mock.patch.object(client, name, value, create=True))
        for name, value in {"LLM": Colocated, "SamplingParams": dict}.items():
            changes.enter_context(mock.patch.object(generation, name, value, create=True))
        any_device = mock.patch.object(
            client.VLLMClient, "init_communicator", lambda self, device=0: stock(self, "cuda")
        )
        changes.enter_context(any_device)
        yield
