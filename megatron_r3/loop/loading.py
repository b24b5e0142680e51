"""How a server is told to load new weights, and how it reports which policy it has.

SGLang and the embedded sampler load a directory by one request, vLLM by three requests of its
development mode. A command of the user may hand over the weights instead, for example over NCCL.
With in_place = false a new server is started for each policy. Whatever the server reports, push.py
verifies the weights.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_r3.collect.client import Client
from megatron_r3.collect.engine import NoAnswer
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.loop.processes import filled_in, start, stop
from megatron_r3.loop.published import PublishedPolicy
from megatron_r3.replay.words import one_line, quoted

MOST_BYTES = 1 << 28
POLL_S = 0.2
_DEV_MODE = (
    "vLLM takes new weights in place only with VLLM_SERVER_DEV_MODE=1 in its environment; or give "
    "[sampler] in_place = false and a command that starts a new vLLM for each policy"
)


class LoadError(EngineError):
    """A server did not load weights, and a second try would not help.

    push.PushError, a subclass, is for a server that took new weights but does not sample with them.
    """


class Loader:
    """Loads policies into one server.

    Args:
        engine: embedded, sglang or vllm.
        client: sends the requests.
        in_place: True loads new weights into the running server, False waits for a new server.
        command: [sampler] push; empty to load by the server's own requests.
        wait_s: how long to wait for a server, or for the command.
    """

    def __init__(
        self, engine: str, client: Client, in_place: bool, command: Sequence[str], wait_s: float
    ) -> None:
        self.engine, self.in_place, self.wait_s = engine, in_place, wait_s
        self._client, self._command = client, command

    @property
    def how(self) -> str:
        """How policies get into the server, in a word, for the events of a run."""
        if not self.in_place:
            return "restarted"
        return "command" if self._command else "loaded"

    async def served(self) -> str:
        """The name of the policy that the server reports; "None" if it has no policy.

        Raises:
            LoadError: the server lacks the page with this name, or the page has another content.
            EngineError: the server does not answer, or not in JSON.
        """
        if self.engine != "vllm":
            # not /server_info: there SGLang 0.5.23 goes on reporting the version of its start
            return await self._read("/model_info", lambda page: page["weight_version"])
        if not self.in_place:
            return await self.model_name()
        return await self._read("/weight_info", lambda page: page["weight_version"])

    async def model_name(self) -> str:
        """The model's name for requests to vLLM; empty for the other engines, which need none."""
        if self.engine != "vllm":
            return ""
        return await self._read("/v1/models", lambda page: page["data"][0]["id"])

    async def _read(self, path: str, value: Callable[[Any], Any]) -> str:
        """A value of a page, as a text."""
        try:
            return str(value(await self._client.get(path)))
        except NoAnswer as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
            hint = f": {_DEV_MODE}" if path == "/weight_info" else ""
            raise LoadError(f"{error}: is it a {self.engine} server?{hint}") from error
        except (LookupError, TypeError) as error:
            raise LoadError(
                f"{self._client.url}{path}: expected the JSON of a {self.engine} server "
                f"({error!r}): is another service at this address?"
            ) from error

    async def wait_until_up(self) -> str:
        """Wait for a server that is still starting; return the policy that it then reports.

        Raises:
            LoadError: the server is of another kind, or cannot load weights.
            EngineError: the server does not come up in time.
        """
        end = time.monotonic() + self.wait_s
        while True:
            try:
                return await self.served()
            except LoadError:
                raise
            except EngineError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(POLL_S)

    async def take(self, policy: PublishedPolicy) -> None:
        """Load a policy into the server, or wait for a server that was started with the policy.

        Raises:
            LoadError: the server did not load the policy, the command failed, or no server with
                the policy came up.
            ValueError: this host does not have the command of [sampler] push.
            EngineError: the server does not answer, or refuses a request.
        """
        if not self.in_place:
            await self._wait_for_restart(policy)
        elif self._command:
            await self._run(policy)
            await self._mark(policy)
        elif self.engine == "vllm":
            await self._load_into_vllm(policy)
            await self._mark(policy)
        else:
            await self._load(policy)

    async def _load(self, policy: PublishedPolicy) -> None:
        """Send SGLang's request to load a directory, which also empties the prefix cache.

        SGLang answers a sampling request a moment before its scheduler has finished the request. A
        load in that moment is answered by 400 "Weights were updated, but the cache was not
        flushed". The load is then sent again until the cache is empty; repeating it does no harm.
        """
        body = {
            "model_path": str(policy.path),
            "weight_version": policy.name,
            "flush_cache": True,
        }
        end = time.monotonic() + self.wait_s
        while True:
            try:
                return await self._post("/update_weights_from_disk", body, policy)
            except NoAnswer as error:
                if "cache was not flushed" not in str(error) or time.monotonic() > end:
                    raise
            await asyncio.sleep(POLL_S)

    async def _load_into_vllm(self, policy: PublishedPolicy) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(policy.path)}}
        await self._client.post("/collective_rpc", body, MOST_BYTES)
        await self._post("/reset_prefix_cache", {}, policy)

    async def _mark(self, policy: PublishedPolicy) -> None:
        """Tell the server the name of its policy, which the server reports from then on."""
        body: dict[str, Any] = {"new_version": policy.name}
        if self.engine == "sglang":
            body["abort_all_requests"] = False
        await self._post("/update_weight_version", body, policy)

    async def _post(self, path: str, body: Mapping[str, Any], policy: PublishedPolicy) -> None:
        answer = await self._client.post(path, body, MOST_BYTES)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise LoadError(
                f"{self._client.url}{path}: the server did not load {policy.path}: it answered "
                f"{quoted(answer, 300)}"
            )

    async def _run(self, policy: PublishedPolicy) -> None:
        values = {
            "model": str(policy.path),
            "version": policy.name,
            "url": self._client.url,
        }
        words = filled_in(self._command, values)
        with tempfile.NamedTemporaryFile(prefix="push-") as log:
            process = start(words, {}, Path(log.name))
            try:
                end = time.monotonic() + self.wait_s
                while (status := process.poll()) is None and time.monotonic() < end:
                    await asyncio.sleep(POLL_S)
            finally:
                # also ends what the command has started: nothing may change the server later
                stop(process)
            said = one_line(log.read()[-500:].decode(errors="replace"), 500)
        if status != 0:
            how = f"no end within {self.wait_s:g} s" if status is None else f"exit status {status}"
            raise LoadError(f"[sampler] push: {' '.join(words)}: {how}: {said}")

    async def _wait_for_restart(self, policy: PublishedPolicy) -> None:
        """Wait until the server that `rl sampler` starts for this policy reports the policy."""
        end, seen = time.monotonic() + self.wait_s, ""
        while time.monotonic() < end:
            try:
                seen = await self.served()
                if policy.is_named(seen):
                    return
            except LoadError:
                raise
            except EngineError:
                pass  # no server yet
            await asyncio.sleep(POLL_S)
        raise LoadError(
            f"{self._client.url}: no server with policy {policy.version} came up within "
            f"{self.wait_s:g} s: see the output of rl sampler"
            + (f"; the server there reports {quoted(seen)}" if seen else "")
        )
