from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests and their programs mean the CPU, or the stand-in

sys.path.insert(0, str(Path(__file__).parent))  # support.py
