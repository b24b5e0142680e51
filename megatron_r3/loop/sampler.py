"""The sampler of a run: the embedded sampler, or a server that is started with a policy.

With in_place = true the server is started once, with the policy of the next collection. With
in_place = false it is started anew when the next collection needs another policy and that policy is
published.
"""

from __future__ import annotations

import pkgutil
import secrets
import subprocess
import threading
import time

from megatron_r3.loop.collected import Collected
from megatron_r3.loop.config import Config, ConfigError
from megatron_r3.loop.processes import filled_in, start, stop
from megatron_r3.loop.published import PublishedPolicy, published, wait_for_policy

_POLL_S = 0.5


def run_sampler(config: Config) -> int:
    """Run the sampler of a run until all collections are stored, or until it is stopped.

    Raises:
        ValueError: the config has no command to start, or a policy is not published in time.
    """
    if config.sampler.engine == "embedded":
        return _run_embedded(config)
    if not config.sampler.command:
        raise ConfigError(
            f"{config.file}: [sampler] command is empty, so there is no sampler to start here: "
            f"start the server of {config.sampler.url} yourself, or give a command"
        )
    return _run_servers(config)


def _run_embedded(config: Config) -> int:
    from megatron_r3.loop.embedded import EmbeddedSampler, server

    degrade = config.sampler.degrade
    sampler = EmbeddedSampler(pkgutil.resolve_name(degrade) if degrade else None)
    with server(sampler, config.sampler.host, config.sampler.port) as made:
        print(f"embedded sampler: {config.sampler.url}, degrade {degrade!r}", flush=True)
        serving = threading.Thread(target=made.serve_forever, args=(_POLL_S,), daemon=True)
        serving.start()
        collected = Collected(config)
        try:
            while collected.count() < config.run.collections:
                time.sleep(_POLL_S)
        finally:
            made.shutdown()
            serving.join()
    return 0


def _run_servers(config: Config) -> int:
    """Keep a server running until all collections are stored, and return 0.

    If the server ends by itself, return its status, or 1 if its status is 0.
    """
    policies, wait = config.directory.policies, config.run.wait
    running: subprocess.Popen[bytes] | None = None
    version, collected = -1, Collected(config)
    try:
        while (stored := collected.count()) < config.run.collections:
            wanted = _wanted(config, stored)
            if running is None or (wanted != version and not config.sampler.in_place):
                if running is not None:
                    stop(running)
                command = _command(config, wait_for_policy(policies, wanted, wait))
                running, version = start(command, config.sampler.environment), wanted
                print(f"server of policy {version}: {config.sampler.url}", flush=True)
            if (status := running.poll()) is not None:
                return status or 1
            time.sleep(_POLL_S)
    finally:
        if running is not None:
            stop(running)
    return 0


def _wanted(config: Config, stored: int) -> int:
    """The version that samples the next collection.

    If that version is not published yet, the newest published version; 0 if there is none.
    """
    wanted = config.version_of(stored)
    there = published(config.directory.policies)
    return wanted if wanted in there else max(there, default=0)


def _command(config: Config, policy: PublishedPolicy) -> list[str]:
    sampler = config.sampler
    values = {
        "model": str(policy.path),
        # a new name at each start, so that the collector verifies a restarted server too
        "version": f"{policy.name}.{secrets.token_hex(2)}",
        "host": sampler.host,
        "port": str(sampler.port),
    }
    return filled_in(sampler.command, values)
