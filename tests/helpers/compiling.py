"""Settings of torch.compile in tests."""

import os
import shutil

import torch

# on a CPU, inductor calls a C++ compiler; without one, tests are about one graph that is right
_CAN_COMPILE = torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "g++"))
COMPILER = "inductor" if _CAN_COMPILE else "aot_eager"
