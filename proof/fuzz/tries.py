"""Feed the code bad input, thousands of times: `make fuzz` runs this file with pytest.

Each class of tries is a test (docs/fuzz.md). A test fails at its first fault: input was accepted
wrongly or refused wrongly, the code crashed or hung, or an error was not one clear line.

FUZZ_TRIES is the number of tries: of all classes together, or of each class if FUZZ_ONLY is set.
"""

from __future__ import annotations

import os

from proof.fuzz import configs, prompts, responses, shards, signals, trees
from proof.fuzz.driver import input_test, machine_test

TRIES, ONLY = int(os.environ.get("FUZZ_TRIES", "10000")), os.environ.get("FUZZ_ONLY")


def share(of_1000: int) -> int:
    """How many tries a class makes: all with FUZZ_ONLY, else `of_1000` of 1,000, at least one."""
    return TRIES if ONLY else max(1, TRIES * of_1000 // 1000)


# those that wait for other processes come first, because they take longest
test_signals = machine_test(signals.Collection, share(8), steps=3)
test_trees = machine_test(trees.Tree, share(12), steps=4)
test_shards = input_test(shards.KIND, share(420))
test_responses = input_test(responses.KIND, share(400))
test_prompts = input_test(prompts.KIND, share(80))
test_configs = input_test(configs.KIND, share(80))
