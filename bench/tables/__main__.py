"""make tables: runs the package as a program, `python bench/tables [options]`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / "bench"), str(ROOT / "examples" / "python")]

if __name__ == "__main__":
    from tables.program import main

    main()
