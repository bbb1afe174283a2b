"""`python -m tessera.gpu`: this folder lies there in an installed Tessera."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from run_stages import main

sys.exit(main())
