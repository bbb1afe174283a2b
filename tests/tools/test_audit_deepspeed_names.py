"""The audit of names runs as a program, and fails where a name is missing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "python" / "deepspeed_alias"), str(ROOT / "tools"), *sys.path]
    environment = {**os.environ, "TESSERA_DEEPSPEED_ALIAS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


def test_all_names_are_served_or_refused():
    done = run("import audit_deepspeed_names as audit; raise SystemExit(audit.main())")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].endswith("0 missing")


def test_a_missing_name_is_a_failure():
    done = run(
        "import audit_deepspeed_names as audit; audit.SERVED += 'deepspeed: no_such'; raise SystemExit(audit.main())"
    )
    assert done.returncode == 1 and "missing  deepspeed.no_such" in done.stdout
