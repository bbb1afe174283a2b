"""What tests of launchers start: FOLDER WORDS... Leaves its ranks and arguments in a file of FOLDER; words say more."""

import os
import sys
import time

local = [argument for argument in sys.argv if argument.startswith("--local_rank=")]
sys.argv = [argument for argument in sys.argv if argument not in local]
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"]
names += [name for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE") if name in os.environ]  # of `deepspeed` alone
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(" ".join(os.environ[name] for name in names) + "|" + "|".join(sys.argv[2:] + local))
if "SECRET" in os.environ:
    print("secret", os.environ["SECRET"])
if "visible" in sys.argv:
    print("devices", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OF_SCRIPT"])
if "fail" in sys.argv:
    if os.environ["RANK"] == "1":
        sys.exit("the reason")
    time.sleep(60)
if "seven" in sys.argv:
    os._exit(7)
if "wait" in sys.argv:
    time.sleep(60)
