"""The audit of names runs as a program, and fails where a name is missing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_names_are_served_or_refused_and_a_missing_one_is_a_failure():
    program = "import audit_deepspeed_names as audit; first = audit.main(); audit.SERVED += 'deepspeed: no_such'; "
    program += "raise SystemExit(10 * first + audit.main())"
    paths = [str(ROOT / "python" / "deepspeed_alias"), str(ROOT / "tools"), *sys.path]
    environment = {**os.environ, "TESSERA_DEEPSPEED_ALIAS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = done.stdout.split(" 0 missing\n")
    for line in (
        "served   deepspeed.initialize",
        "refused  deepspeed.moe.layer.MoE: ",
        "refused  deepspeed.runtime.zenflow.zenflow_utils.",
        "served   engine.backward (stage 0)",
    ):
        assert line in before
    assert "missing  deepspeed.no_such" in after
