"""The embedded sampler as a server that begins with a policy, as vLLM and SGLang do.

python restarting_server.py MODEL VERSION PORT PID_FILE
"""

import os
import sys
from pathlib import Path

import torch

from megatron_r3.loop.embedded import EmbeddedSampler, server

if __name__ == "__main__":
    model, version, port, pid_file = sys.argv[1:]
    torch.set_num_threads(1)
    sampler = EmbeddedSampler()
    sampler.load(Path(model), version)
    Path(pid_file).write_text(str(os.getpid()))
    with server(sampler, "127.0.0.1", int(port)) as made:
        made.serve_forever()
