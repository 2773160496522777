"""The imports with which role processes on GPUs are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rljob_trainer.roles.warm.server import SERVER_ENVIRONMENT
from rljob_trainer.rollout.config import engine_environment

_IMPORT = """
import json, sys
import torch
from rljob_trainer.roles.warm import server
torch.cuda.is_available = None  # the answer would initialize CUDA
server._import([*server._SHARED, *server.MODULES["rollout"]], "cuda")
known = ["vllm", *server.IMPORTED_IN_FORKS]
print(json.dumps([server.obstacle_to_forks(), [name for name in known if name in sys.modules]]))
"""


def test_an_engines_imports_for_gpus_leave_vllm_and_threads_to_the_fork() -> None:
    variables = {**os.environ, **engine_environment("cuda"), **SERVER_ENVIRONMENT}
    printed = subprocess.run([sys.executable, "-c", _IMPORT], env=variables, check=True, stdout=subprocess.PIPE).stdout
    assert json.loads(printed) == [None, []]
