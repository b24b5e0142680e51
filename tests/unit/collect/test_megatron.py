"""How Megatron's server is asked, and what of an answer says who sampled it."""

import pytest

from megatron_r3.collect.engine import Identity, NoAnswer
from megatron_r3.collect.prompt_plan import Sampling, sampling_for
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import build_request
from megatron_r3.collect.server import Watch
from megatron_r3.data.engines.megatron import policy_versions
from megatron_r3.data.engines.shape import EngineError

PLAIN = Sampling(max_tokens=8)


def prompt(content):
    return Prompt("prompts.jsonl, line 1", 0, content, {})


def test_a_plain_request_filters_nothing():
    path, body = build_request("megatron", prompt([5, 9]), PLAIN, None, "")
    assert path == "/v1/completions"
    assert body["prompt"] == [5, 9]
    # upstream: 0.0 is off, and 1.0 cuts where rounded probabilities add up to more than 1
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 0.0, 0)
    messages = [{"role": "user", "content": "hi"}]
    path, body = build_request("megatron", prompt(messages), PLAIN, None, "")
    assert path == "/v1/chat/completions"
    assert (body["messages"], body["n"], body["return_tokenized_data"]) == (messages, 1, True)
    _, body = build_request("megatron", prompt([5]), Sampling(8, top_p=0.9), None, "")
    assert body["top_p"] == 0.9


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(8, seed=1), "--seed: Megatron's server takes no seed with a request"),
        (Sampling(8, temperature=0.7, top_k=50), "returns no kept sets"),
        (Sampling(8, top_p=0.9), "returns no kept sets"),
        (Sampling(8, temperature=0), "the likeliest token is taken"),
        (Sampling(8, top_k=50, top_p=0.9), "--top-k and --top-p: Megatron's engine takes one"),
    ],
)
def test_what_the_server_cannot_do_is_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        sampling_for("megatron", sampling)


def test_sampling_that_the_loss_knows():
    assert sampling_for("megatron", PLAIN) == PLAIN


def test_the_weights_of_each_token():
    assert policy_versions([[0, 3], [6, 4]], 5, 3).tolist() == [3, 3, 4]
    assert policy_versions([[0, 3], [5, 4]], 5, 3).tolist() == [3, 4, 4]


@pytest.mark.parametrize("epochs", [5, "ab", [[0, 3], [4]], [[0, "new"]], [[2, 3]], [[0, 3], 4]])
def test_epochs_that_are_none(epochs):
    with pytest.raises(EngineError, match="policy_epoch"):
        policy_versions(epochs, 5, 3)


class Pages:
    """A client that gives pages, and 404 for others."""

    url = "http://here"

    def __init__(self, **pages):
        self.pages = {f"/{name}": page for name, page in pages.items()}

    async def get(self, path):
        if path not in self.pages:
            raise NoAnswer("not found", 404)
        return self.pages[path]


HEALTH = {"status": "ok", "service": "Megatron Inference Server", "ready": True}
INFO = {"version": "0.19.2", "model": "/ckpt", "policy": "iteration 7"}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_who_the_server_is(anyio_backend):
    watch = Watch(Pages(health=HEALTH, server_info=INFO), "megatron")
    assert await watch.begin() == Identity("0.19.2", "/ckpt", "iteration 7")
    watch._client.pages["/server_info"] = {**INFO, "policy": "iteration 8"}
    with pytest.raises(ValueError, match="its policy was 'iteration 7' at the start and is"):
        await watch.confirm()
    # upstream's own script has no such page
    assert await Watch(Pages(health=HEALTH), "megatron").begin() == Identity()
    for page in ({"service": "another"}, {}, []):
        with pytest.raises(EngineError, match="/health: no megatron server has such a page"):
            await Watch(Pages(health=page), "megatron").begin()
